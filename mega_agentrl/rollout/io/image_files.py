"""Images beside tree files, for people and the tree viewer.

Each image is written once, as `images/<image_id>.png` (or the suffix of its format) in the folder
of the tree files: the file itself if it has at most `MAX_FILE_BYTES`, otherwise a reduced JPEG.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.config.sections.data import MAX_IMAGE_PIXELS
from mega_agentrl.types.atomic_file import atomic_path
from mega_agentrl.vision.container import FORMATS
from mega_agentrl.vision.loader import ImageLimits, check_image, decode_rgb
from mega_agentrl.vision.placeholders import image_parts

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.types.images import ImageInput, PlacedImage
    from mega_agentrl.types.records import Message, Prompt, RolloutTree, Trajectory, Turn

FOLDER = "images"
"""Folder of the images, beside the tree files."""
MAX_FILE_BYTES = 1 << 16
"""Size up to which files are copied as they are."""
MAX_SIDE = 512
"""Longer side in pixels of a reduced image."""
_LIMITS = ImageLimits(max_file_bytes=1 << 30, max_file_pixels=MAX_IMAGE_PIXELS)
"""Largest bounds that a run may have; it has checked the files with its own."""

_log = logging.getLogger(__name__)


def find_image(folder: Path, image_id: str) -> Path | None:
    """Return the file of an image beside the tree files in `folder`, None if it was not written."""
    if not image_id.isalnum():  # an id is a digest; a tree of others may have a path in its place
        return None
    # The names are tried one by one: to search a folder of all images would take long for each.
    paths = (folder / FOLDER / f"{image_id}.{kind.lower()}" for kind in FORMATS)
    return next((path for path in paths if path.is_file()), None)


def write_images(folder: Path, trees: Sequence[RolloutTree]) -> None:
    """Write the images of trees that are not yet in the folder.

    An image whose file has vanished is left out with a warning.
    """
    for image in {image.image_id: image for tree in trees for image in _images(tree)}.values():
        if find_image(folder, image.image_id) is not None:
            continue
        try:
            data, suffix = _small_file(image)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow's for broken PNG files
            _log.warning("%r is not written beside the trees: %s", image, error)
            continue
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / FOLDER / f"{image.image_id}.{suffix}") as temporary:
            temporary.write_bytes(data)


def without_bytes(tree: RolloutTree) -> RolloutTree:
    """Return a copy whose images have neither bytes nor pixels; without images, the tree itself."""
    if next(_images(tree), None) is None:
        return tree
    prompt = replace(
        tree.prompt,
        images=_strip(tree.prompt.images),
        messages=tuple(_strip_message(message) for message in tree.prompt.messages),
    )
    greedy = tree.greedy_trajectory
    return replace(
        tree,
        prompt=prompt,
        trajectories=[_strip_trajectory(item, prompt) for item in tree.trajectories],
        greedy_trajectory=None if greedy is None else _strip_trajectory(greedy, prompt),
    )


def restore_messages(prompt: Prompt) -> Prompt:
    """Return a prompt, read from a file, with its images as parts of its messages."""
    if not prompt.images:
        return prompt
    images = (placed.image for placed in prompt.images)
    messages = tuple(
        {**message, "content": [_restore_part(part, images) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in prompt.messages
    )
    return replace(prompt, messages=messages)


def _restore_part(part: dict[str, object], images: Iterator[ImageInput]) -> dict[str, object]:
    return {**part, "image": next(images)} if part["type"] == "image" else part


def _images(tree: RolloutTree) -> Iterator[ImageInput]:
    yield from (placed.image for placed in tree.prompt.images)
    yield from image_parts(tree.prompt.messages)
    for trajectory in tree.all_trajectories:
        yield from (placed.image for placed in trajectory.images)


def _strip(images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
    return tuple(replace(placed, image=_strip_image(placed.image)) for placed in images)


def _strip_image(image: ImageInput) -> ImageInput:
    return replace(image, data=b"", pixels_HWC=None)


def _strip_message(message: Message) -> Message:
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        {**part, "image": _strip_image(part["image"])} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _strip_trajectory(trajectory: Trajectory, prompt: Prompt) -> Trajectory:
    resets = tuple(
        replace(reset, images=_strip(reset.images)) for reset in trajectory.context_resets
    )
    return replace(
        trajectory,
        prompt=prompt,
        turns=[_strip_turn(turn) for turn in trajectory.turns],
        images=_strip(trajectory.images),
        context_resets=resets,
    )


def _strip_turn(turn: Turn) -> Turn:
    if turn.outcome is None or not turn.outcome.images:
        return turn
    return replace(turn, outcome=replace(turn.outcome, images=()))


def _small_file(image: ImageInput) -> tuple[bytes, str]:
    """Return the bytes and the suffix of the file to write."""
    data = image.read()
    kind = check_image(data, repr(image), _LIMITS)
    if len(data) <= MAX_FILE_BYTES:
        return data, kind.lower()
    buffer = io.BytesIO()
    decode_rgb(data, max_side=MAX_SIDE).save(buffer, format="JPEG")
    return buffer.getvalue(), "jpeg"
