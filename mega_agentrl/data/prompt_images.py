"""Images and videos of prompts: from the cells of a row to records among the parts of messages.

A row has its images in the column `data.image_key`, and `<image>` in the texts of its messages
where they belong; likewise videos and `<video>`. Messages may instead have lists of parts as
content, such as `{"type": "image"}` for the next image of the column, or `{"type": "image",
"image": ...}` and `{"type": "image_url", "image_url": {"url": ...}}` with an image of their own.
The number of images must match. A video becomes its frames, as images one after the other.

A dataset keeps paths and sizes only. Images that a table contains as bytes are written once to a
folder, under the hash of their bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.remote_files import FetchLimits, fetch_to_cache
from mega_agentrl.vision.loader import (
    ImageLimits,
    animation_frames,
    check_image,
    image_bytes,
    read_header,
)

if TYPE_CHECKING:
    from mega_agentrl.config.sections.data import DataConfig
    from mega_agentrl.types.images import ImageInput
    from mega_agentrl.types.records import Message
    from mega_agentrl.vision.processor import ImageProcessor

IMAGE_MARKER, VIDEO_MARKER = "<image>", "<video>"
"""Texts that stand for the next image or video of a row."""

_MARKERS = re.compile(f"({IMAGE_MARKER}|{VIDEO_MARKER})")
_IMAGE_MEMBERS = ("image", "image_url", "url", "path", "bytes")
_MAX_VERIFY_THREADS = 16
_MIB = 2**20


class RemoteImageError(ConfigError):
    """An image is at a URL, and the caller gave no cache folder for remote files."""


def image_limits(config: DataConfig) -> ImageLimits:
    """Return the bounds of image files."""
    return ImageLimits(
        max_file_bytes=int(config.max_image_mib * _MIB), max_file_pixels=config.max_image_pixels
    )


class PromptImageReader:
    """Reads the images of rows for a vision-language model.

    Args:
        config: columns, bounds and frame rate.
        processor: measures the images for the model.
        cache_folder: folder for copies of remote images and for images that tables contain; None
            refuses the former and keeps the latter in memory.
    """

    def __init__(
        self, config: DataConfig, processor: ImageProcessor, *, cache_folder: Path | None
    ) -> None:
        self._config = config
        self._processor = processor
        self._limits = image_limits(config)
        self._cache_folder = cache_folder
        self._images: dict[str, tuple[ImageInput, str]] = {}

    def attach(
        self,
        messages: Sequence[Message],
        row: Mapping[str, Any],
        where: str,
        folder: Path | None = None,
    ) -> tuple[Message, ...]:
        """Return the messages with image parts in place of markers and of the dataset's parts.

        Args:
            messages: messages whose content is a text or a list of parts.
            row: the row by column.
            where: setting, file and row, for errors.
            folder: folder to which paths of images are relative.

        Raises:
            ValueError: an image cannot be used, or there are more or fewer than the messages need.
        """
        images = _Cells(row, self._config.image_key, IMAGE_MARKER, where)
        videos = _Cells(row, self._config.video_key, VIDEO_MARKER, where)
        attached = []
        for message in messages:
            content: list[dict[str, Any]] = []
            for part in _dataset_parts(message["content"], images.is_used, videos.is_used):
                if part["type"] == "text":
                    content.append(part)
                    continue
                cells = videos if part["type"] == "video" else images
                cell, place = cells.take(part)
                read = self._read_video if part["type"] == "video" else self._read_image
                content += [
                    {"type": "image", "image": image} for image in read(cell, place, folder)
                ]
            is_text = all(part["type"] == "text" for part in content)
            text = "".join(part["text"] for part in content) if is_text else ""
            attached.append({**message, "content": text if is_text else content})
        images.check_all_taken()
        videos.check_all_taken()
        return tuple(attached)

    def verify(self) -> None:
        """Decode all images read so far, each once, in threads: the first damaged one is an error.

        Does nothing without `data.verify_images`.
        """
        found, self._images = list(self._images.values()), {}
        if not self._config.verify_images or not found:
            return
        num_threads = min(_MAX_VERIFY_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="verify-images") as pool:
            for _ in pool.map(self._verify, found):
                pass

    def _verify(self, found: tuple[ImageInput, str]) -> None:
        image, where = found
        check_image(image.read(), where, self._limits, decode=True)

    def _read_image(self, cell: Any, where: str, folder: Path | None) -> list[ImageInput]:
        data, path = self._bytes(cell, where, folder)
        return [self._measure(data, path, where)]

    def _read_video(self, cell: Any, where: str, folder: Path | None) -> list[ImageInput]:
        data, _ = self._bytes(cell, where, folder)
        frames = animation_frames(
            data,
            where,
            self._limits,
            fps=self._config.video_fps,
            max_frames=self._config.max_frames,
        )
        return [
            self._measure(frame, "", f"{where}, frame {index}")
            for index, frame in enumerate(frames)
        ]

    def _bytes(self, cell: Any, where: str, folder: Path | None) -> tuple[bytes, str]:
        return image_bytes(cell, where, self._limits, folder=folder, fetch=self._fetch)

    def _measure(self, data: bytes, path: str, where: str) -> ImageInput:
        header = read_header(data, where, self._limits)
        if not path and self._cache_folder is not None:
            path = str(_store(data, header.kind, self._cache_folder))
        image = self._processor.measure(data, path=path, size=header.size)
        known, _ = self._images.setdefault(image.image_id, (image, where))
        return known

    def _fetch(self, url: str, where: str) -> Path:
        if self._cache_folder is None:
            raise RemoteImageError(
                where,
                url,
                "a path without a scheme, because the caller gave no cache folder for remote files",
            )
        limits = FetchLimits(max_bytes=self._limits.max_file_bytes)
        return fetch_to_cache(url, self._cache_folder, key=where, limits=limits)


class _Cells:
    """The images or videos of one row, which markers and parts take in order."""

    def __init__(self, row: Mapping[str, Any], column: str, marker: str, where: str) -> None:
        cell = row.get(column) if column else None
        self._cells = list(cell) if isinstance(cell, list | tuple) else [cell]
        if cell is None:
            self._cells = []
        self._column = column
        self._marker = marker
        self._where = where
        self._num_taken = 0

    @property
    def is_used(self) -> bool:
        """Whether markers stand for images; otherwise they are text."""
        return bool(self._column)

    def take(self, part: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the cell of a part, its own or the next of the column, and its place."""
        own = next((part[name] for name in _IMAGE_MEMBERS if part.get(name)), part.get("video"))
        if own:
            return own, f"{self._where}, part {part['type']} of a message"
        index = self._num_taken
        self._num_taken += 1
        if index >= len(self._cells):
            raise ConfigError(
                f"{self._where}, column {self._column or '(none)'}",
                f"{len(self._cells)} entries",
                f"one for each {self._marker} of the messages, which have at least {index + 1}",
                f"another column (data.{'image' if self._marker == IMAGE_MARKER else 'video'}_key; "
                f"empty if {self._marker} is just text), or a marker too many",
            )
        return self._cells[index], f"{self._where}, column {self._column}[{index}]"

    def check_all_taken(self) -> None:
        """Raise a `ConfigError` if entries are left over."""
        if self._num_taken < len(self._cells):
            raise ConfigError(
                f"{self._where}, column {self._column}",
                f"{len(self._cells)} entries",
                f"as many as the messages have {self._marker} markers or parts without an image of "
                f"their own, {self._num_taken}",
                f"a prompt template that drops {self._marker}, or text without markers",
            )


def _dataset_parts(
    content: Any, images_are_used: bool, videos_are_used: bool
) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message; markers in a text become parts, empty texts are left out."""
    if isinstance(content, list):
        for part in content:
            kind = "image" if part["type"] == "image_url" else part["type"]
            yield {**part, "type": kind}
        return
    is_marker = {IMAGE_MARKER: images_are_used, VIDEO_MARKER: videos_are_used}
    for piece in _MARKERS.split(content):
        if is_marker.get(piece):
            yield {"type": "image" if piece == IMAGE_MARKER else "video"}
        elif piece:
            yield {"type": "text", "text": piece}


def _store(data: bytes, kind: str, folder: Path) -> Path:
    """Write the bytes to a file named by their hash, unless it exists, and return its path."""
    name = hashlib.blake2b(data, digest_size=16).hexdigest()
    path = folder / "images" / name[:2] / f"{name}.{kind.lower()}"
    if path.is_file() and path.stat().st_size == len(data):
        return path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `atomic_path`: several processes may write the same file, so each needs a name of its own.
    fd, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return path.absolute()
