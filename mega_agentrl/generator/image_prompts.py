"""Prompts for vLLM, with the images of a vision-language model.

The token ids of a request are final: an image is a run of placeholder tokens in them, one for each
feature. vLLM therefore gets them as a rendered prompt. It would expand the placeholders of any
other prompt once more.

vLLM finds cached keys and values by token ids and by the hashes of the images among them, and a
cached image by its hash. Both caches are dropped by `Engine.pause`, before the weights change.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import torch
from cachetools import LRUCache
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from mega_agentrl.vision.processor import ImageProcessor, ImageTokens, find_image_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.inputs.engine import MultiModalInput, TokensInput

    from mega_agentrl.types.images import ImageInput, PlacedImage
    from mega_agentrl.types.records import GenerateRequest

PATCH_CACHE_BYTES = 512 << 20
"""Bytes of patches that an engine's host keeps, so that the requests of a prompt share them."""
_IMAGE, _PATCHES, _GRID = "image", "pixel_values", "image_grid_thw"
"""vLLM's names of the modality and of the inputs of a Qwen vision tower."""


class ImageRequestError(ValueError):
    """A request whose images do not fit its tokens or the model."""

    def __init__(self, request_id: str, field: str, got: str, expected: str, cause: str) -> None:
        super().__init__(request_id, field, got, expected, cause)
        self.request_id = request_id
        self.field = field
        """Field of the request, for example `images[1].start`."""
        self.got = got
        self.expected = expected
        self.cause = cause
        """Probable cause."""

    def __str__(self) -> str:
        """Return the message on one line."""
        return (
            f"request {self.request_id}: {self.field} is {self.got}, expected {self.expected}; "
            f"probable cause: {self.cause}"
        )


def check_images(request: GenerateRequest, tokens: ImageTokens | None) -> None:
    """Check the images of a request.

    Args:
        request: The request.
        tokens: Image tokens of the model; None for a text model.

    Raises:
        ImageRequestError: The model is a text model, an image has no pixels of its size, or the
            placeholder tokens are not exactly those of the images.
    """
    if tokens is None:
        if request.images:
            raise ImageRequestError(
                request.request_id,
                "images",
                f"{len(request.images)} images",
                "none, as the engine serves a text model",
                "a dataset or a tool with images for model.path without a vision tower",
            )
        return
    for index, placed in enumerate(request.images):
        _check_pixels(request.request_id, index, placed.image)
    _check_placeholders(request, tokens)


def _check_pixels(request_id: str, index: int, image: ImageInput) -> None:
    """Raise unless the pixels are loaded and divide into the patches of the grid."""
    pixels_HWC = image.pixels_HWC
    _, rows, columns = image.grid_thw
    is_divided = (
        pixels_HWC is not None
        and pixels_HWC.dtype == np.uint8
        and pixels_HWC.ndim == 3
        and pixels_HWC.shape[0] * columns == pixels_HWC.shape[1] * rows
        and pixels_HWC.shape[0] % rows == 0
        and pixels_HWC.shape[2] == 3
    )
    if not is_divided:
        found = "None" if pixels_HWC is None else f"{pixels_HWC.dtype} {list(pixels_HWC.shape)}"
        raise ImageRequestError(
            request_id,
            f"images[{index}].image.pixels_HWC",
            found,
            f"uint8 [H, W, 3] of {rows} x {columns} square patches",
            "an image that was not loaded, or was resized with other settings than measured",
        )


def _check_placeholders(request: GenerateRequest, tokens: ImageTokens) -> None:
    """Raise unless the image tokens of a request stand exactly where its images are."""
    ids_T = np.array(request.token_ids)
    is_placeholder_T = ids_T == tokens.image_id
    expected_T = np.zeros(len(ids_T), dtype=bool)
    previous_stop = 0
    for index, placed in enumerate(request.images):
        if not previous_stop <= placed.start <= placed.stop <= len(ids_T):
            raise ImageRequestError(
                request.request_id,
                f"images[{index}]",
                f"tokens {placed.start}..{placed.stop - 1}",
                f"tokens within {previous_stop}..{len(ids_T) - 1}",
                "images in another order than their tokens, or starts that count another sequence",
            )
        expected_T[placed.start : placed.stop] = True
        previous_stop = placed.stop
    is_wrong_T = (is_placeholder_T != expected_T) | (ids_T == tokens.video_id)
    if is_wrong_T.any():
        position = int(is_wrong_T.argmax())
        expected = (
            f"{tokens.image_id}, a placeholder of an image"
            if expected_T[position]
            else "a token of text, because no image stands there"
        )
        raise ImageRequestError(
            request.request_id,
            f"token_ids[{position}]",
            str(ids_T[position]),
            expected,
            "a special token of images in a text that was encoded without escaping it, or starts "
            "that count another sequence",
        )


class ImagePrompts:
    """Turns requests into rendered prompts; cuts each image into patches once.

    Args:
        folder: Model folder.
        max_bytes: Maximum size of the patches that are kept.
    """

    def __init__(self, folder: str | Path, max_bytes: int = PATCH_CACHE_BYTES) -> None:
        self.tokens = find_image_tokens(folder)
        """Image tokens of the model; None for a text model."""
        self._processor = ImageProcessor(folder) if self.tokens is not None else None
        self._patches: LRUCache[str, np.ndarray] = LRUCache(
            max_bytes, getsizeof=lambda patches: patches.nbytes
        )
        self._lock = asyncio.Lock()

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled: those that mark images and videos."""
        return () if self.tokens is None else self.tokens.all_ids

    @property
    def pixels_per_token(self) -> int | None:
        """Number of pixels of an image for each of its tokens; None for a text model."""
        if self._processor is None:
            return None
        return (self._processor.patch_size * self._processor.merge_size) ** 2

    async def render(self, request: GenerateRequest) -> TokensInput | MultiModalInput:
        """Return vLLM's prompt of a request that `check_images` has accepted."""
        token_ids = list(request.token_ids)
        if not request.images:
            return tokens_input(token_ids)
        items = [await self._model_inputs(placed.image) for placed in request.images]
        return mm_input(
            token_ids,
            MultiModalKwargsItems({_IMAGE: items}),
            {_IMAGE: [placed.image.image_id for placed in request.images]},
            {_IMAGE: [_placeholder_range(placed) for placed in request.images]},
        )

    async def _model_inputs(self, image: ImageInput) -> MultiModalKwargsItem:
        """Return the inputs of the vision tower: patches `[t h w, patch_dim]` and grid."""
        patches = torch.from_numpy(await self._cut(image))
        grid_T = torch.tensor(image.grid_thw)
        fields = {
            # vLLM's scheduler keeps only fields with `keep_on_cpu` of an image that it finds in the
            # prefix cache. The model runner of CPUs has nothing else when it computes a held or
            # preempted request again, without the cache; that of GPUs gets the image once more.
            _PATCHES: MultiModalFieldConfig.flat_from_sizes(
                _IMAGE,
                torch.tensor([len(patches)]),
                keep_on_cpu=not torch.cuda.is_available(),
            ).build_elems(_PATCHES, patches),
            _GRID: MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True).build_elems(
                _GRID, grid_T[None]
            ),
        }
        return MultiModalKwargsItem({key: elements[0] for key, elements in fields.items()})

    async def _cut(self, image: ImageInput) -> np.ndarray:
        """Return the patches of an image, computed in a thread unless they are known.

        Waits for the patches of other requests, one image at a time.
        """
        assert self._processor is not None, "checked by check_images"
        async with self._lock:
            patches = self._patches.get(image.image_id)
            if patches is None:
                patches = await asyncio.to_thread(self._processor.patches, image)
                if patches.nbytes <= self._patches.maxsize:
                    self._patches[image.image_id] = patches
        return patches


def _placeholder_range(placed: PlacedImage) -> PlaceholderRange:
    return PlaceholderRange(offset=placed.start, length=placed.image.num_tokens)
