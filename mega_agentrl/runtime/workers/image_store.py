"""Sends the pixels of images to the engines: once per machine instead of with every request.

The driver puts the pixels of an image into Ray's object store, and sends requests with references
to them. The engines of a machine read the same copy. The driver keeps the references of the images
used last; the store drops an image when neither the driver nor a running request refers to it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from cachetools import LRUCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.types.images import ImageInput
    from mega_agentrl.types.records import GenerateRequest

STORE_BYTES = 1 << 30
"""Bytes of pixels that the driver keeps in the object store."""


class ImageStore:
    """References to the pixels of the images that were used last.

    Args:
        max_bytes: Maximum size of the pixels that are kept.
        put: Stores an object and returns a reference.
    """

    def __init__(self, max_bytes: int = STORE_BYTES, put: Callable[[Any], Any] = ray.put) -> None:
        self._put = put
        self._entries: LRUCache[str, tuple[Any, int]] = LRUCache(
            max_bytes, getsizeof=lambda entry: entry[1]
        )

    def detach(self, request: GenerateRequest) -> tuple[GenerateRequest, dict[str, Any]]:
        """Return the request without pixels, and references to them by image id."""
        refs = {placed.image.image_id: self._ref(placed.image) for placed in request.images}
        images = tuple(
            replace(placed, image=replace(placed.image, pixels_HWC=None, data=b""))
            for placed in request.images
        )
        return replace(request, images=images), refs

    def _ref(self, image: ImageInput) -> Any:
        if image.image_id in self._entries:
            return self._entries[image.image_id][0]
        assert image.pixels_HWC is not None, f"{image!r} was not loaded"
        ref, num_bytes = self._put(image.pixels_HWC), image.pixels_HWC.nbytes
        if num_bytes <= self._entries.maxsize:
            self._entries[image.image_id] = (ref, num_bytes)
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
