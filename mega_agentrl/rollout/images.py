"""Images of the conversations of a run: pixels for the engines, and images that others send.

`RolloutImages.check` is the way by which every image of an outsider comes into a run: those in the
answers of tools, MCP servers and environments, and those in the requests of agents. A file is
parsed, decoded and resized in threads, once: its record is found again by the hash of its bytes for
as long as a trajectory has it, and the pixels of the most recently used images are kept, up to a
number of bytes. Large images are decoded one at a time, so that they neither fill the memory nor
delay the others. Records of trajectories hold no pixels.

An image that cannot be loaded, for example because its file was deleted, raises a
`ToolSessionError` and thus fails the trajectory; a bad image of a tool's answer is an outcome.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolOutcome, ToolStatus
from mega_agentrl.vision.loader import LARGE_PIXELS, ImageLimits, read_header
from mega_agentrl.vision.placeholders import locate_images

if TYPE_CHECKING:
    from mega_agentrl.types.images import ImageInput, PlacedImage
    from mega_agentrl.types.protocols import ImageLoader
    from mega_agentrl.types.records import RolloutTree, Trajectory
    from mega_agentrl.vision.processor import ImageProcessor, ImageTokens

IMAGES = "images"
"""Name of the tool in the outcome of an image that cannot be loaded."""

_MIB = 2**20
MAX_TRAJECTORY_BYTES = 256 * _MIB
"""Largest size of the image files that the tools of a trajectory answer with, which it holds until
it is trained on: 80 screenshots of 3 MiB."""

_NUM_THREADS = 4

_log = logging.getLogger(__name__)


class RolloutImages:
    """An `ImageLoader` that keeps the pixels of recent images; thread-safe.

    Args:
        processor: Resizes images for the model.
        tokens: Special tokens of images.
        limits: Bounds of an image file.
        max_per_answer: Maximum number of images of a tool's answer.
        max_cache_bytes: Size up to which pixels are kept.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        tokens: ImageTokens,
        limits: ImageLimits | None = None,
        *,
        max_per_answer: int = 4,
        max_cache_bytes: int = 2048 * _MIB,
    ) -> None:
        self._tokens = tokens
        self._processor = processor
        self._limits = limits or ImageLimits()
        self._max_per_answer = max_per_answer
        self._max_cache_bytes = max_cache_bytes
        self._num_bytes: dict[str, int] = {}
        self._loaded: OrderedDict[str, Future[ImageInput]] = OrderedDict()
        self._lock = threading.Lock()
        self._checked: WeakValueDictionary[str, ImageInput] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="load-images")
        self._large_thread = ThreadPoolExecutor(1, thread_name_prefix="load-large-images")

    async def load(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """Return the images with their pixels; waits for threads that decode the missing ones.

        Raises:
            ToolSessionError: an image cannot be loaded.
        """
        futures = [self._submit(placed.image) for placed in images]
        for future in futures:
            await _wait_until_done(future)
        return _with_pixels(images, futures)

    def load_trees(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        """Return copies of trees, to be packed for training, whose images have their pixels.

        Blocks while images are decoded. An image is one object in all trees.

        Raises:
            ToolSessionError: an image cannot be loaded.
        """
        return [
            replace(tree, trajectories=[self._with_images(item) for item in tree.trajectories])
            for tree in trees
        ]

    async def check(self, data: bytes, where: str) -> ImageInput:
        """Return the record of an image file of somebody else (`types.protocols.ImageLoader`)."""
        measured = self._threads.submit(self._measure, data, where)
        await _wait_until_done(measured)
        image = measured.result()
        loaded = self._submit(image)
        await _wait_until_done(loaded)
        loaded.result()
        return image

    async def check_answer(self, outcome: ToolOutcome) -> ToolOutcome:
        """Return the outcome of a call with records of its images, or an error in its place.

        An image that cannot be shown is an error that the policy sees, whoever made the file: the
        policy may have chosen it.
        """
        if not outcome.images:
            return outcome
        count = len(outcome.images)
        if count > self._max_per_answer:
            text = f"The answer has {count} images, more than the {self._max_per_answer} allowed."
            return _error(outcome, ToolStatus.user_error, text)
        try:
            records = [
                await self.check(image, f"tool {outcome.tool}, image {index}")
                if isinstance(image, bytes)
                else image
                for index, image in enumerate(outcome.images)
            ]
        except ValueError as error:
            return _error(outcome, ToolStatus.user_error, str(error))
        return replace(outcome, images=tuple(records))

    def locate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[PlacedImage, ...]:
        """Return where the images, in order, stand among token ids."""
        return locate_images(token_ids, images, self._tokens.image_id)

    def placeholder_ids(self, image: ImageInput) -> list[int]:
        """Return the tokens of an image: start, a placeholder for each feature, end."""
        return self._tokens.placeholder_ids(image)

    def _with_images(self, trajectory: Trajectory) -> Trajectory:
        prompt = trajectory.prompt
        resets = tuple(
            replace(reset, images=self.load_now(reset.images))
            for reset in trajectory.context_resets
        )
        return replace(
            trajectory,
            prompt=replace(prompt, images=self.load_now(prompt.images)),
            images=self.load_now(trajectory.images),
            context_resets=resets,
        )

    def load_now(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """Return the images with their pixels; blocks while missing ones are decoded.

        Raises:
            ToolSessionError: an image cannot be loaded.
        """
        return _with_pixels(images, [self._submit(placed.image) for placed in images])

    def _submit(self, image: ImageInput) -> Future[ImageInput]:
        """Return the image with its pixels, as a future that a thread fulfils."""
        image_id = image.image_id
        with self._lock:
            future = self._loaded.get(image_id)
            if future is not None:
                self._loaded.move_to_end(image_id)
                return future
            is_large = image.width * image.height > LARGE_PIXELS
            threads = self._large_thread if is_large else self._threads
            future = self._loaded[image_id] = threads.submit(self._decode, image)
        # The future outlives the record, which the callback must not hold.
        future.add_done_callback(lambda done: self._account(image_id, done))
        return future

    def _account(self, image_id: str, future: Future[ImageInput]) -> None:
        """Count the bytes of a new image and drop the oldest ones; failures are not kept."""
        with self._lock:
            if future.cancelled() or future.exception() is not None:
                self._loaded.pop(image_id, None)
                return
            self._num_bytes[image_id] = _num_bytes(future.result())
            surplus = sum(self._num_bytes.values()) - self._max_cache_bytes
            for oldest in list(self._loaded):
                if surplus <= 0:
                    break
                if oldest in self._num_bytes and oldest != image_id:
                    del self._loaded[oldest]
                    surplus -= self._num_bytes.pop(oldest)

    def _measure(self, data: bytes, where: str) -> ImageInput:
        """Return the known record of a file, or a new one if nothing has it any more."""
        image_id = self._processor.image_id(data)
        image = self._checked.get(image_id)
        if image is None:
            header = read_header(data, where, self._limits)
            image = self._processor.measure(data, size=header.size)
            image = self._checked.setdefault(image_id, image)
        return image

    def _decode(self, image: ImageInput) -> ImageInput:
        where = image.path or f"image {image.image_id}"
        expected = "the image file that the run has measured"
        with reading(where, "image", expected):
            data = image.read()
            if self._processor.image_id(data) != image.image_id:
                raise ConfigError(where, f"{len(data)} bytes", expected, "the file was replaced")
            loaded = self._processor.load(replace(image, data=data))
        return replace(loaded, data=image.data)


async def check_answers(
    images: ImageLoader | None,
    outcomes: Sequence[ToolOutcome],
    shown: Sequence[PlacedImage] = (),
) -> list[ToolOutcome]:
    """Return outcomes with errors in place of those whose images cannot be shown.

    Args:
        images: The images of the run; None for a model of text, which sees none.
        outcomes: The outcomes of the calls of one turn.
        shown: Earlier images of the trajectory's tools, with which it holds at most
            `MAX_TRAJECTORY_BYTES`.
    """
    if images is not None:
        held, checked = sum(len(placed.image.data) for placed in shown), []
        for outcome in outcomes:
            size = sum(
                len(image if isinstance(image, bytes) else image.data) for image in outcome.images
            )
            if outcome.images and held + size > MAX_TRAJECTORY_BYTES:
                most = MAX_TRAJECTORY_BYTES // _MIB
                text = (
                    f"The images of a conversation may have {most} MiB; with this they have more."
                )
                checked.append(_error(outcome, ToolStatus.user_error, text))
                continue
            held += size
            checked.append(await images.check_answer(outcome))
        return checked
    return [_without_images(outcome) if outcome.images else outcome for outcome in outcomes]


def _without_images(outcome: ToolOutcome) -> ToolOutcome:
    """Return the error that the policy of a model of text reads; it may have asked for images."""
    text = "the answer has images, expected text: model.path has no vision tower"
    _log.warning("tool %s: %s", outcome.tool, text)
    return _error(outcome, ToolStatus.user_error, text)


def _error(outcome: ToolOutcome, status: ToolStatus, text: str) -> ToolOutcome:
    return replace(outcome, status=status, answer=text, images=())


def _with_pixels(
    images: Sequence[PlacedImage], futures: Sequence[Future[ImageInput]]
) -> tuple[PlacedImage, ...]:
    try:
        return tuple(
            replace(placed, image=future.result())
            for placed, future in zip(images, futures, strict=True)
        )
    except ValueError as error:
        outcome = ToolOutcome(
            tool=IMAGES, status=ToolStatus.infra_error, answer=str(error), latency_s=0.0
        )
        raise ToolSessionError(outcome) from error


async def _wait_until_done(future: Future[ImageInput]) -> None:
    """Wait for a thread; a cancelled wait leaves the future to others who wait for it."""
    if not future.done():
        waiting = asyncio.wrap_future(future)
        await asyncio.wait({waiting})
        if not waiting.cancelled():
            waiting.exception()  # retrieved, so that asyncio does not log it


def _num_bytes(image: ImageInput) -> int:
    assert image.pixels_HWC is not None
    return int(image.pixels_HWC.nbytes) + len(image.data)
