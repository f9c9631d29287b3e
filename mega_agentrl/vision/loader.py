"""Bytes of image files, checked before anything decodes their pixels.

A cell of a dataset names an image as a path, a URL, a base64 data URL, bytes, or a struct of these
(`{"bytes": ..., "path": ...}` as Hugging Face datasets write it, `{"url": ...}` as OpenAI's API
has it). The format follows from the bytes, never from the name of the file. The size of the file
and its segments (see `container`) are bounded before Pillow opens it, and the number of pixels, the
aspect ratio and the number of passes over the pixels before they are decoded. Every error is a
`ConfigError` that names the image's place.

`decode_rgb` gives the pixels that viewers show, and `shown_size` their size: everything that
decodes an image, for a model, a tool or a report, uses them. Their time grows with the file, up to
seconds: call them in a thread where an event loop runs.
"""

from __future__ import annotations

import base64
import io
import os.path
import threading
from bisect import bisect_right
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading
from mega_agentrl.vision.container import (
    ANIMATION_FORMATS,
    FORMATS,
    MAX_METADATA_BYTES,
    Container,
    check_exif,
    read_container,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.Image import Image as PillowImage

    FetchUrl = Callable[[str, str], Path]
    """fetch(url, where): path of a local copy; errors name `where`."""

MAX_ASPECT_RATIO = 200
"""Largest ratio of the sides, beyond which the resizing of Qwen's processors fails."""
MAX_DECODED_PIXELS = 500_000_000
"""Largest number of pixels that a decoder goes over, in all scans of a JPEG file or all frames of
an animation up to the last one that is used; some 10 s of work. It is more if `MAX_PASSES` over the
largest image of the limits are more. Progressive JPEG files have 10 scans; a film of 1280 x 720
pixels may have 542 frames."""
MAX_PASSES = 10
"""Number of times that the largest image of the limits may be gone over."""
LARGE_PIXELS = 1 << 24
"""Number of pixels from which an image is large. Decoding takes up to 16 bytes a pixel, so that
large images are decoded one at a time."""

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
_MAX_BYTES_PER_PIXEL = 16
"""Largest size of a file by its pixels, beside its metadata: twice that of 16-bit RGBA without
compression. More is no image, but what is hidden in one."""
_decoding_large = threading.Lock()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """The properties that an image file states of itself."""

    kind: str
    """One of `FORMATS`."""
    size: tuple[int, int]
    """Width and height in pixels of the upright image."""


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
        return _decode_data_url(cell, where, limits), ""
    path = str(fetch(cell, where)) if "://" in cell else _find_file(cell, where, folder)
    with reading(where, cell, _EXPECTED):
        _check_file_size(os.path.getsize(path), where, limits)
        return Path(path).read_bytes(), os.path.abspath(path)


def check_image(data: bytes, where: str, limits: ImageLimits, *, decode: bool = False) -> str:
    """Check an image file as `read_header` does and return its format, one of `FORMATS`."""
    return read_header(data, where, limits, decode=decode).kind


def read_header(
    data: bytes, where: str, limits: ImageLimits, *, decode: bool = False
) -> ImageHeader:
    """Check an image file and return its format and its size.

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
        container = read_container(data)
        with _open_image(data, container) as image:
            _check_pixels(image, where, limits)
            _check_work(image, container.num_scans, where, limits)
            _check_density(image, container, len(data), where)
            size = _upright_size(image)
            if decode:
                with _taking_turns(image):
                    image.load()
            return ImageHeader(kind=container.kind, size=size)


def decode_rgb(data: bytes, *, max_side: int | None = None) -> PillowImage:
    """Decode an image that `check_image` has accepted into 8-bit RGB, as it is shown.

    The image is turned as its EXIF orientation says, transparent pixels are laid on white as vLLM
    does, and 16-bit grey values lose their lower byte.

    Args:
        data: the bytes of the file.
        max_side: reduce the image to at most so many pixels a side; None for its own size.
    """
    with _open_image(data, read_container(data)) as image:
        if max_side is not None:
            image.draft("RGB", (max_side, max_side))
        with _taking_turns(image):
            shown = _shown_image(image)
            if max_side is not None:
                shown.thumbnail((max_side, max_side))
    return shown


def shown_size(data: bytes) -> tuple[int, int]:
    """Return width and height of the image that `decode_rgb` returns, without decoding it."""
    with _open_image(data, read_container(data)) as image:
        return _upright_size(image)


def animation_frames(
    data: bytes, where: str, limits: ImageLimits, *, fps: float, max_frames: int
) -> list[bytes]:
    """Return frames of an animation as PNG files.

    Frames are those shown at 0, 1/fps, 2/fps, ... seconds; if these are more than `max_frames`, at
    as many evenly spaced times. A frame occurs once. Frames behind the last of them are not
    decoded; those before are, because each changes the picture of the one before.

    Raises:
        ConfigError: the file is not an animation that can be read.
    """
    _check_file_size(len(data), where, limits)
    with reading(where, f"{len(data)} bytes", _EXPECTED_VIDEO, "not a readable animation"):
        container = read_container(data)
        if container.kind not in ANIMATION_FORMATS:
            raise ValueError(f"got a file in {container.kind}")
        durations_ms = container.durations_ms or [1.0]
        chosen = choose_frames(durations_ms, fps=fps, max_frames=max_frames)
        used, frames = set(chosen), []
        with _open_image(data, container) as image:
            for index in range(chosen[-1] + 1):
                image.seek(index)
                _check_pixels(image, where, limits)  # a frame of GIF may make the picture larger
                _check_work(image, chosen[-1] + 1, where, limits)
                if index in used:
                    with _taking_turns(image):
                        frames.append(_frame_as_png(image))
        return frames


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


def _open_image(data: bytes, container: Container) -> PillowImage:
    """Open a file whose segments have been checked, which is why its container is given."""
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=(container.kind,))


@contextmanager
def _taking_turns(image: PillowImage) -> Iterator[None]:
    """Let only one thread at a time decode a large image."""
    with _decoding_large if image.width * image.height > LARGE_PIXELS else nullcontext():
        yield


def _frame_as_png(image: PillowImage) -> bytes:
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


def _upright_size(image: PillowImage) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) in _QUARTER_TURNS else (width, height)


def _orientation(image: PillowImage) -> int:
    """Return the EXIF orientation from 1 to 8 of a file whose pixels are not decoded yet."""
    from PIL import ExifTags, Image

    with suppress(Exception):  # a damaged EXIF block raises errors of many kinds
        if isinstance(text := image.info.get("Raw profile type exif"), str):
            check_exif(bytes.fromhex("".join(text.split("\n")[3:])))
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


def _check_work(image: PillowImage, num_passes: int, where: str, limits: ImageLimits) -> None:
    num_pixels = num_passes * image.width * image.height
    most = max(MAX_DECODED_PIXELS, MAX_PASSES * limits.max_file_pixels)
    if num_pixels > most:
        raise ConfigError(
            where,
            f"{num_pixels} pixels in {num_passes} frames or scans",
            f"at most {most} pixels to decode",
            "a file made to take time; or a film, which has to be shorter, smaller or of fewer "
            "frames a second",
        )


def _check_density(image: PillowImage, container: Container, num_bytes: int, where: str) -> None:
    num_pixels = image.width * image.height * max(1, len(container.durations_ms))
    if num_bytes > MAX_METADATA_BYTES + _MAX_BYTES_PER_PIXEL * num_pixels:
        raise ConfigError(
            where,
            f"{num_bytes} bytes for {num_pixels} pixels",
            f"at most {_MAX_BYTES_PER_PIXEL} bytes a pixel, and {MAX_METADATA_BYTES} bytes of "
            "metadata",
            "another file hidden in an image",
        )


def _decode_data_url(url: str, where: str, limits: ImageLimits) -> bytes:
    head, _, body = url.partition(",")
    _check_file_size(max(1, len(body) * 3 // 4 - 2), where, limits)
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
