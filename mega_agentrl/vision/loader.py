"""Bytes of image files, checked before anything decodes their pixels.

A cell of a dataset names an image as a path, a URL, a base64 data URL, bytes, or a struct of these
(`{"bytes": ..., "path": ...}` as Hugging Face datasets write it, `{"url": ...}` as OpenAI's API
has it). The format follows from the bytes, never from the name of the file. Size of the file,
number of pixels and aspect ratio are bounded before pixels are decoded; Pillow bounds the metadata
of a PNG file. Every error is a `ConfigError` that names the image's place.

`decode_rgb` gives the pixels that viewers show, and `shown_size` their size: everything that
decodes an image, for a model, a tool or a report, uses them.
"""

from __future__ import annotations

import base64
import io
import os.path
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL.Image import Image as PillowImage

    FetchUrl = Callable[[str, str], Path]
    """fetch(url, where): path of a local copy; errors name `where`."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; of an animation the first frame."""
ANIMATION_FORMATS = ("GIF", "WEBP", "PNG")
"""Formats whose frames can be read as a video."""
MAX_ASPECT_RATIO = 200
"""Largest ratio of the sides, beyond which the resizing of Qwen's processors fails."""

_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's transposition that turns an image of each EXIF orientation upright."""
_QUARTER_TURNS = (5, 6, 7, 8)
"""Orientations that exchange width and height."""
_MIB = 2**20
_DEFAULT_FRAME_MS = 100.0
"""Duration of a frame without one, as browsers show it."""
_EXPECTED = f"an image file ({', '.join(FORMATS)})"
_EXPECTED_CELL = (
    "a path, a URL, a base64 data URL (data:image/png;base64,...), bytes, or a struct with one of "
    "the members bytes, path, url, image or image_url"
)
_EXPECTED_VIDEO = (
    "an animation as GIF, WebP or APNG; other containers (MP4, MKV, ...) need a decoder that is "
    "not installed here: convert them, for example with `ffmpeg -i clip.mp4 -vf fps=2 clip.webp`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Bounds of an image file."""

    max_file_bytes: int = 32 * _MIB
    """Largest size of the file in bytes."""
    max_file_pixels: int = 50_000_000
    """Largest number of pixels of the file, width times height."""


def image_bytes(
    cell: Any, where: str, limits: ImageLimits, *, folder: Path | None, fetch: FetchUrl
) -> tuple[bytes, str]:
    """Return the bytes of the image of a cell, and the path of its file, empty if it has none.

    Args:
        cell: path, URL, data URL, bytes or a struct of these.
        where: setting, file, row and column, for errors.
        limits: bounds of the file.
        folder: folder to which paths are relative, before the working folder.
        fetch: returns the path of a local copy of a URL.
    """
    if isinstance(cell, bytes | bytearray | memoryview):
        return bytes(cell), ""
    if isinstance(cell, dict):
        for name in ("bytes", "image", "image_url", "url", "path"):
            if cell.get(name):
                return image_bytes(cell[name], where, limits, folder=folder, fetch=fetch)
    if not isinstance(cell, str) or not cell:
        raise ConfigError(where, cell, _EXPECTED_CELL, "another column is meant")
    if cell.startswith("data:"):
        return _decode_data_url(cell, where), ""
    path = str(fetch(cell, where)) if "://" in cell else _find_file(cell, where, folder)
    with reading(where, cell, _EXPECTED):
        _check_file_size(os.path.getsize(path), where, limits)
        return Path(path).read_bytes(), os.path.abspath(path)


def check_image(data: bytes, where: str, limits: ImageLimits, *, decode: bool = False) -> str:
    """Check an image file and return its format, one of `FORMATS`.

    Args:
        data: the bytes of the file.
        where: place of the image, for errors.
        limits: bounds of the file.
        decode: also decode the pixels, which finds a truncated file.

    Raises:
        ConfigError: the file is not an image, damaged, too large or too elongated.
    """
    _check_file_size(len(data), where, limits)
    problem = "damaged, truncated, or not an image in spite of its name"
    with reading(where, f"{len(data)} bytes", _EXPECTED, problem):
        with _open_image(data, FORMATS) as image:
            _check_pixels(image, where, limits)
            if decode:
                image.load()
            return str(image.format)


def decode_rgb(data: bytes, *, max_side: int | None = None) -> PillowImage:
    """Decode an image that `check_image` has accepted into 8-bit RGB, as it is shown.

    The image is turned as its EXIF orientation says, transparent pixels are laid on white as vLLM
    does, and 16-bit grey values lose their lower byte.

    Args:
        data: the bytes of the file.
        max_side: reduce the image to at most so many pixels a side; None for its own size.
    """
    with _open_image(data, FORMATS) as image:
        if max_side is not None:
            image.draft("RGB", (max_side, max_side))
        shown = _shown_image(image)
    if max_side is not None:
        shown.thumbnail((max_side, max_side))
    return shown


def shown_size(data: bytes) -> tuple[int, int]:
    """Return width and height of the image that `decode_rgb` returns, without decoding it."""
    with _open_image(data, FORMATS) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _QUARTER_TURNS else (width, height)


def animation_frames(
    data: bytes, where: str, limits: ImageLimits, *, fps: float, max_frames: int
) -> list[bytes]:
    """Return frames of an animation as PNG files.

    Frames are those shown at 0, 1/fps, 2/fps, ... seconds; if these are more than `max_frames`, at
    as many evenly spaced times. A frame occurs once.

    Raises:
        ConfigError: the file is not an animation that can be read.
    """
    _check_file_size(len(data), where, limits)
    with reading(where, f"{len(data)} bytes", _EXPECTED_VIDEO, "not a readable animation"):
        with _open_image(data, ANIMATION_FORMATS) as image:
            _check_pixels(image, where, limits)
            durations_ms: list[float] = []
            for index in range(getattr(image, "n_frames", 1)):
                image.seek(index)
                image.load()  # Pillow knows the duration of a WebP frame only then
                durations_ms.append(float(image.info.get("duration") or _DEFAULT_FRAME_MS))
            chosen = choose_frames(durations_ms, fps=fps, max_frames=max_frames)
            return [_frame_as_png(image, index) for index in chosen]


def choose_frames(durations_ms: Sequence[float], *, fps: float, max_frames: int) -> list[int]:
    """Return the indices of the frames to show, in order.

    Example: frames of 400, 100 and 500 ms at 2 frames a second are shown at 0 and 500 ms: 0 and 2.
    """
    total_ms = sum(durations_ms)
    num_times = max(1, int(total_ms * fps / 1000))
    step_ms = 1000 / fps
    if num_times > max_frames:
        num_times, step_ms = max_frames, total_ms / max_frames
    ends_ms = list(accumulate(durations_ms))
    return sorted({bisect_right(ends_ms, number * step_ms) for number in range(num_times)})


def _open_image(data: bytes, formats: tuple[str, ...]) -> PillowImage:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=formats)


def _frame_as_png(image: PillowImage, index: int) -> bytes:
    image.seek(index)
    buffer = io.BytesIO()
    _shown_image(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _shown_image(image: PillowImage) -> PillowImage:
    """Return the current frame of an open file in RGB, upright and without transparency."""
    from PIL import Image

    turn = _TURNS.get(_orientation(image))
    image.load()
    alpha = None
    if image.mode.startswith("I"):
        image, alpha = _reduce_to_8_bits(image)
    elif image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    shown = image.convert("RGB")
    if alpha is not None:
        background = Image.new("RGB", image.size, "white")
        background.paste(shown, mask=alpha)
        shown = background
    return shown if turn is None else shown.transpose(Image.Transpose[turn])


def _reduce_to_8_bits(image: PillowImage) -> tuple[PillowImage, PillowImage | None]:
    """Return the upper bytes of 16-bit grey values, and a mask if one value is transparent."""
    import numpy as np
    from PIL import Image

    value_HW = np.asarray(image).astype(np.int64)
    grey = Image.fromarray((value_HW >> 8).clip(0, 255).astype(np.uint8))
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return grey, None
    return grey, Image.fromarray(np.where(value_HW == transparent, 0, 255).astype(np.uint8))


def _orientation(image: PillowImage) -> int:
    """Return the EXIF orientation from 1 to 8 of a file whose pixels are not decoded yet."""
    from PIL import ExifTags, Image

    with suppress(Exception):  # a damaged EXIF block raises errors of many kinds
        # That of PNG files would decode all pixels, in search of a block behind them.
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    return 1


def _check_file_size(num_bytes: int, where: str, limits: ImageLimits) -> None:
    if not num_bytes:
        raise ConfigError(where, "0 bytes", _EXPECTED, "an empty file or cell")
    if num_bytes > limits.max_file_bytes:
        raise ConfigError(
            where,
            f"{num_bytes} bytes",
            f"an image file of at most data.max_image_mib={limits.max_file_bytes / _MIB:g} MiB",
            "another kind of file, or an image of a much higher resolution than the model reads",
        )


def _check_pixels(image: PillowImage, where: str, limits: ImageLimits) -> None:
    width, height = image.size
    got = f"{image.format} of {width} x {height} pixels"
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        cause = "a damaged header, or a line instead of a picture"
        raise ConfigError(where, got, f"an aspect ratio of at most {MAX_ASPECT_RATIO}", cause)
    if width * height > limits.max_file_pixels:
        raise ConfigError(
            where,
            got,
            f"at most data.max_image_pixels={limits.max_file_pixels} pixels in the file",
            "a file made to use up memory, or an image that should be scaled down first",
        )


def _decode_data_url(url: str, where: str) -> bytes:
    head, _, body = url.partition(",")
    with reading(where, head[:80], "a data URL data:image/...;base64,...", "not base64"):
        if not head.endswith(";base64"):
            raise ValueError("it has no ;base64")
        return base64.b64decode(body, validate=True)


def _find_file(path: str, where: str, folder: Path | None) -> str:
    candidates = [str(folder / path)] if folder is not None else []
    for candidate in (*candidates, path):
        if os.path.isfile(candidate):
            return candidate
    looked = f" in {folder} or" if folder is not None else ""
    raise ConfigError(
        where,
        path,
        f"an existing image file; a relative path is looked for{looked} in {os.getcwd()}",
        "images that were not copied with the table, or a cell of another kind",
    )
