"""Small versions of a tree's images, as data URIs for the report page.

A file may come from anywhere, so it is decoded and written anew, as PNG or JPEG: nothing of its own
bytes reaches the page. Images beyond the limits, and those whose file is gone or damaged, are shown
by their label only.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mega_agentrl.types.images import ImageInput
from mega_agentrl.vision.loader import ImageLimits, check_image, decode_rgb

THUMBNAIL_SIZE = 128
"""Maximum width and height of a thumbnail in pixels."""
MAX_THUMBNAIL_BYTES = 16 * 1024
MAX_THUMBNAILS_PER_TREE = 32
_JPEG_QUALITIES = (80, 50)
_LIMITS = ImageLimits()


class TreeThumbnails:
    """The images of one tree, each once, in the order in which they are first shown.

    Args:
        find_file: returns the file of an image by its id, None if there is none; without it images
            are read from where the run found them.
    """

    def __init__(self, find_file: Callable[[str], Path | None] | None = None) -> None:
        self._find_file = find_file
        self._index: dict[ImageInput, int] = {}

    def add(self, images: Iterable[ImageInput]) -> list[int]:
        """Return the numbers of the images in `to_json`."""
        return [self._index.setdefault(image, len(self._index)) for image in images]

    def to_json(self) -> list[dict[str, Any]]:
        """Return label and, within the limits, data URI (`src`) of each image."""
        entries: list[dict[str, Any]] = []
        for image, index in self._index.items():
            size = f"{image.width} x {image.height} pixels, {image.num_tokens} tokens"
            uri = self._thumbnail(image) if index < MAX_THUMBNAILS_PER_TREE else ""
            entries.append({"label": size} | ({"src": uri} if uri else {}))
        return entries

    def _thumbnail(self, image: ImageInput) -> str:
        if self._find_file is not None:
            file = self._find_file(image.image_id)
            if file is None:
                return ""
            image = replace(image, path=str(file), data=b"")
        return thumbnail_uri(image)


@lru_cache(maxsize=4096)
def thumbnail_uri(image: ImageInput) -> str:
    """Return the data URI of a thumbnail; empty if the file cannot be read or is too large."""
    if not image.data:
        path = Path(image.path)
        if not path.is_file() or path.stat().st_size > _LIMITS.max_file_bytes:
            return ""
    try:
        data = image.read()
        check_image(data, repr(image), _LIMITS)
        small = decode_rgb(data, max_side=THUMBNAIL_SIZE)
    except (OSError, ValueError, SyntaxError):  # Pillow's SyntaxError is for broken PNG files
        return ""
    return _encode(small)


def _encode(image: Any) -> str:
    """Return a PNG, which is exact, or if that is too large a JPEG; empty if both are."""
    settings: list[tuple[str, dict[str, Any]]] = [("PNG", {"optimize": True})]
    settings += [("JPEG", {"quality": quality}) for quality in _JPEG_QUALITIES]
    for name, options in settings:
        buffer = io.BytesIO()
        image.save(buffer, format=name, **options)
        if buffer.tell() <= MAX_THUMBNAIL_BYTES:
            text = base64.b64encode(buffer.getvalue()).decode()
            return f"data:image/{name.lower()};base64,{text}"
    return ""
