"""Sends the pixels of images to the engines: once per machine instead of with every request.

The driver puts the pixels of an image into Ray's object store, and sends requests with references
to them. The engines of a machine read the same copy. The driver keeps the references of the images
used last; the store drops an image when neither the driver nor a running request refers to it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.types.images import ImageInput
    from mega_agentrl.types.records import GenerateRequest

STORE_BYTES = 1 << 30
"""Bytes of pixels that the driver keeps in the object store."""


class ImageStore:
    """References to the pixels of images, least recently used first.

    Args:
        max_bytes: Maximum size of the pixels that are kept.
        put: Stores an object and returns a reference.
    """

    def __init__(self, max_bytes: int = STORE_BYTES, put: Callable[[Any], Any] = ray.put) -> None:
        self._max_bytes = max_bytes
        self._put = put
        self._num_bytes = 0
        self._entries: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def detach(self, request: GenerateRequest) -> tuple[GenerateRequest, dict[str, Any]]:
        """Return the request without pixels, and references to them by image id."""
        refs = {placed.image.image_id: self._ref(placed.image) for placed in request.images}
        images = tuple(
            replace(placed, image=replace(placed.image, pixels_HWC=None, data=b""))
            for placed in request.images
        )
        return replace(request, images=images), refs

    def _ref(self, image: ImageInput) -> Any:
        key = image.image_id
        if key not in self._entries:
            assert image.pixels_HWC is not None, f"{image!r} was not loaded"
            self._entries[key] = (self._put(image.pixels_HWC), image.pixels_HWC.nbytes)
            self._num_bytes += image.pixels_HWC.nbytes
        ref, _ = self._entries[key]
        self._entries.move_to_end(key)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1][1]
        return ref


async def attach_images(request: GenerateRequest, refs: Mapping[str, Any]) -> GenerateRequest:
    """Return the request of `ImageStore.detach` with its pixels, which are read-only.

    Waits until they have arrived on this machine.
    """
    pixels = dict(zip(refs, await asyncio.gather(*refs.values()), strict=True))
    images = tuple(
        replace(placed, image=replace(placed.image, pixels_HWC=pixels[placed.image.image_id]))
        for placed in request.images
    )
    return replace(request, images=images)
