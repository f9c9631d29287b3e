"""Walks the segments of an image file before a decoder opens it.

A decoder does work for each segment of a file, whatever the size of its picture: 32 MiB of empty
segments take Pillow half a minute and a gigabyte. `read_container` goes through a file without
reading more than the heads of its segments, and refuses those of which a decoder would have more
to do than the bytes and pixels of the file justify:

* more than `MAX_SEGMENTS` segments, or `MAX_METADATA_BYTES`, beside the pixels. Bytes without
  meaning between segments count as segments, because decoders read them one by one, and compressed
  metadata count with their size after decompression;
* pixels in tiny pieces;
* directories of EXIF data with more than `MAX_SEGMENTS` entries;
* features that decoders follow differently, or that nobody needs, such as run-length encoded BMP.

The walk goes the way that Pillow's and the C libraries' parsers go, so that nothing can be hidden
from it; where they would accept more than a sound file has, it raises an error.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; of an animation the first frame."""
ANIMATION_FORMATS = ("GIF", "WEBP", "PNG")
"""Formats whose frames can be read as a video."""
MAX_SEGMENTS = 1000
"""Largest number of segments beside the pixels; cameras write about 20, editors at most 100."""
MAX_METADATA_BYTES = 4 << 20
"""Largest size of what is no pixels: a colour profile for print has up to 3 MiB."""
MAX_FRAMES = 10_000
"""Largest number of frames of an animation, the largest `data.max_frames`."""

_SEGMENTS_PER_FRAME = 4
"""Segments that each frame of an animation may have in addition: its times, often a comment."""
_MIN_PNG_PIECE, _MIN_GIF_PIECE = 1024, 64
"""Least average number of bytes in a piece of pixels, beside `MAX_SEGMENTS` smaller ones. PNG files
have pieces of 8 KiB and more, GIF files of 255 bytes."""
_MAX_JPEG_TABLES = 1 << 16
"""Largest size of the tables and frame headers before the pixels of a JPEG file, which Pillow goes
through entry by entry; a file has some 600 bytes of them."""
_DEFAULT_FRAME_MS = 100.0
"""Duration of a frame without one, as browsers show it."""
_FIRST_WINDOW, _LAST_WINDOW = 4096, 1 << 20
"""Numbers of bytes that are searched at once for the end of a JPEG scan, from the first on."""


@dataclass(slots=True)
class Container:
    """The facts that the segments of a file state, and the number of segments."""

    kind: str
    """One of `FORMATS`."""
    durations_ms: list[float] = field(default_factory=list)
    """Duration of each frame of an animation in GIF, WebP or PNG; empty for other files."""
    num_scans: int = 1
    """Number of passes over its pixels that a JPEG file asks for."""
    num_segments: int = 0
    """Segments that are no pixels, and bytes between segments."""
    num_pieces: int = 0
    """Segments of pixels."""
    num_metadata_bytes: int = 0
    """Size of the segments that are no pixels, after decompression."""

    def add_segment(self, num_bytes: int) -> None:
        """Count a segment that is no pixels.

        Raises:
            ValueError: the file has too many, or too many bytes in them.
        """
        self.num_segments += 1
        self.num_metadata_bytes += num_bytes
        if self.num_segments > MAX_SEGMENTS + _SEGMENTS_PER_FRAME * len(self.durations_ms):
            raise ValueError(f"more than {MAX_SEGMENTS} segments beside its pixels")
        if self.num_metadata_bytes > MAX_METADATA_BYTES:
            raise ValueError(f"more than {MAX_METADATA_BYTES} bytes beside its pixels")

    def add_piece(self, num_bytes: int, min_piece: int) -> None:
        """Count a segment of pixels of a file of `num_bytes`; raise `ValueError` for too many."""
        self.num_pieces += 1
        if self.num_pieces > MAX_SEGMENTS + num_bytes // min_piece:
            raise ValueError(f"pixels in pieces of fewer than {min_piece} bytes on average")

    def add_frame(self, duration_ms: float) -> None:
        """Count a frame; raise `ValueError` for too many."""
        self.durations_ms.append(duration_ms or _DEFAULT_FRAME_MS)
        if len(self.durations_ms) > MAX_FRAMES:
            raise ValueError(f"more than {MAX_FRAMES} frames")


def read_container(data: bytes) -> Container:
    """Go through the segments of a file; whether its pixels can be decoded is not known then.

    Raises:
        ValueError: the file has none of `FORMATS`, or its segments exceed the bounds.
    """
    for kind, signature, walk in _WALKS:
        if data.startswith(signature) and (kind != "WEBP" or data[8:12] == b"WEBP"):
            container = Container(kind)
            walk(data, container)
            return container
    raise ValueError(f"it begins with {data[:12]!r}, not as one of {', '.join(FORMATS)}")


def check_exif(exif: bytes) -> None:
    """Raise `ValueError` if the first directory of EXIF data has too many entries."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    if exif[:2] not in (b"II", b"MM") or len(exif) < 8:
        return  # decoders ignore it
    order, is_big = "<" if exif[:2] == b"II" else ">", exif[2] == 43
    offset_at, offset_form, count_form = (8, "Q", "Q") if is_big else (4, "L", "H")
    try:
        (offset,) = struct.unpack_from(order + offset_form, exif, offset_at)
        (num_entries,) = struct.unpack_from(order + count_form, exif, min(offset, len(exif)))
    except struct.error:
        return  # it is cut off
    if num_entries > MAX_SEGMENTS:
        raise ValueError(f"a directory of {num_entries} EXIF entries")


def _walk_png(data: bytes, container: Container) -> None:
    position, num_promised, starts_with_picture = 8, 0, False
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        body = memoryview(data)[position + 8 : position + 8 + length]
        position += 12 + length
        if name == b"IEND":
            break
        if name in (b"IDAT", b"fdAT", b"DDAT"):
            starts_with_picture |= not container.durations_ms  # it is no frame of the animation
            container.add_piece(len(data), _MIN_PNG_PIECE)
            continue
        container.add_segment(_png_metadata_size(name, body))
        if name == b"eXIf":
            check_exif(bytes(body))
        elif name == b"acTL":
            num_promised = int.from_bytes(body[:4])
        elif name == b"fcTL" and len(body) >= 26:
            numerator, denominator = struct.unpack_from(">HH", body, 20)
            container.add_frame(numerator / (denominator or 100) * 1000)
    del container.durations_ms[num_promised:]
    if starts_with_picture:
        container.durations_ms.insert(0, _DEFAULT_FRAME_MS)


def _png_metadata_size(name: bytes, body: memoryview) -> int:
    """Return the size of a chunk after decompression, of which the bound is decompressed."""
    if name not in (b"iCCP", b"zTXt", b"iTXt"):
        return len(body)
    _, _, rest = bytes(body).partition(b"\0")
    compressed = rest[1:]
    if name == b"iTXt":
        if rest[:1] in (b"", b"\0"):
            return len(body)
        compressed = rest[2:].split(b"\0", 2)[-1]
    try:
        text = zlib.decompressobj().decompress(compressed, MAX_METADATA_BYTES)
    except zlib.error:
        return len(body)  # decoders leave it out, or refuse the file
    return max(len(body), len(text))


def _walk_jpeg(data: bytes, container: Container) -> None:
    position, num_table_bytes = 2, 0
    exif: list[bytes] = []
    container.num_scans = 0
    while position + 1 < len(data):
        first, marker = data[position : position + 2]
        if first != 0xFF or marker == 0xFF:
            container.add_segment(1)  # a byte that parsers skip
            position += 1
            continue
        if marker in _SEGMENT_MARKERS:
            length = max(2, int.from_bytes(data[position + 2 : position + 4]))
            body = data[position + 4 : position + 2 + length]
            if marker == _APP1 and body.startswith(b"Exif\0\0"):
                exif.append(body[6:])
            elif marker == _APP2 and body.startswith(b"MPF\0"):
                check_exif(body[4:])
            elif marker == _APP13:
                container.num_segments += body.count(b"8BIM")  # each begins a block of Photoshop
            elif not container.num_scans and marker <= _LAST_TABLE and marker != _SOS:
                num_table_bytes += length
                if num_table_bytes > _MAX_JPEG_TABLES:
                    raise ValueError(f"more than {_MAX_JPEG_TABLES} bytes of tables and frames")
            container.num_scans += marker == _SOS
        elif container.num_scans and marker != _TEM:
            break  # the end, or what a decoder stops at
        elif marker in _LONE_MARKERS or container.num_scans:
            length = 0
        else:
            raise ValueError(f"the marker 0x{marker:02x} before its pixels")
        container.add_segment(length)
        position += 2 + length
        if container.num_scans:
            position = _next_marker(data, position)
    check_exif(b"".join(exif))


def _next_marker(data: bytes, start: int) -> int:
    """Return the position of the first marker behind compressed pixels, or the end of the data."""
    size = _FIRST_WINDOW
    while start + 1 < len(data):
        window = np.frombuffer(data, np.uint8, min(size, len(data) - start), start)
        places = np.flatnonzero(window[:-1] == 0xFF)
        following = window[places + 1]
        is_marker = (following != 0) & (following != 0xFF) & ((following & 0xF8) != 0xD0)
        if (found := places[is_marker]).size:
            return start + int(found[0])
        start += len(window) - 1
        size = min(2 * size, _LAST_WINDOW)
    return len(data)


def _walk_gif(data: bytes, container: Container) -> None:
    position = 13 + _palette_size(data[10:11])
    duration_ms = 0.0
    while position < len(data) and data[position] != ord(";"):
        if data[position] == ord("!"):
            label, block = data[position + 1 : position + 2], data[position + 2 : position + 15]
            is_empty = block[:1] == b"\0" or (
                block.startswith(b"\x0bNETSCAPE2.0") and block[12:] == b"\0"
            )
            if is_empty and label != _GIF_COMMENT:
                raise ValueError("an extension without data, about whose end decoders disagree")
            if label == _GIF_CONTROL:
                duration_ms = 10.0 * int.from_bytes(block[2:4], "little")
            position = _skip_blocks(data, position + 2, container.add_segment)
        elif data[position] == ord(","):
            container.add_frame(duration_ms)
            duration_ms = 0.0
            start = position + 11 + _palette_size(data[position + 9 : position + 10])
            position = _skip_blocks(
                data, start, lambda _: container.add_piece(len(data), _MIN_GIF_PIECE)
            )
        else:
            container.add_segment(1)  # a byte that decoders skip
            position += 1


def _palette_size(flags: bytes) -> int:
    """Return the number of bytes of the palette that the flags of a GIF header announce."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _skip_blocks(data: bytes, position: int, count: Callable[[int], None]) -> int:
    """Return the position behind the blocks, and call `count` with the size of each."""
    while position < len(data) and (size := data[position]):
        count(size)
        position += 1 + size
    return position + 1


def _walk_webp(data: bytes, container: Container) -> None:
    position, stop = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    while position + 8 <= stop:
        name, length = struct.unpack_from("<4sI", data, position)
        body = memoryview(data)[position + 8 : position + 8 + length]
        position += 8 + length + length % 2
        if name == b"ANMF":
            container.add_frame(float(int.from_bytes(body[12:15], "little")))
        else:
            container.add_segment(0 if name in (b"VP8 ", b"VP8L", b"ALPH") else len(body))
        if name == b"EXIF":
            check_exif(bytes(body))


def _walk_bmp(data: bytes, container: Container) -> None:
    start_of_pixels, header_size = (int.from_bytes(data[n : n + 4], "little") for n in (10, 14))
    compression = int.from_bytes(data[30:34], "little") if header_size >= 40 else _BMP_NONE
    if compression not in (_BMP_NONE, _BMP_BIT_FIELDS):
        raise ValueError(f"the compression {compression} of BMP, which is not read")
    container.add_segment(max(start_of_pixels, header_size))


_TEM, _SOS, _LAST_TABLE, _APP1, _APP2, _APP13 = 0x01, 0xDA, 0xDF, 0xE1, 0xE2, 0xED
_LONE_MARKERS = frozenset((0x00, *range(0xD0, 0xDA)))
"""Bytes behind 0xFF in JPEG files that no length follows: escaped data, restarts, start and end."""
_SEGMENT_MARKERS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xF0), 0xFE)) - {0xC8}
_GIF_CONTROL, _GIF_COMMENT = b"\xf9", b"\xfe"
_BMP_NONE, _BMP_BIT_FIELDS = 0, 3
_WALKS: tuple[tuple[str, bytes, Callable[[bytes, Container], None]], ...] = (
    ("PNG", b"\x89PNG\r\n\x1a\n", _walk_png),
    ("JPEG", b"\xff\xd8\xff", _walk_jpeg),
    ("WEBP", b"RIFF", _walk_webp),
    ("GIF", b"GIF87a", _walk_gif),
    ("GIF", b"GIF89a", _walk_gif),
    ("BMP", b"BM", _walk_bmp),
)
