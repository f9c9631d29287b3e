"""Files whose segments would keep a decoder busy are refused before one opens them."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageSequence

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.vision import loader
from mega_agentrl.vision.container import (
    ANIMATION_FORMATS,
    MAX_FRAMES,
    MAX_METADATA_BYTES,
    MAX_SEGMENTS,
    read_container,
)
from mega_agentrl.vision.loader import ImageLimits, animation_frames, check_image, decode_rgb

WHERE = "data.train=a.parquet row 3, column images[0]"
SIZE = (28, 28)
MANY = MAX_SEGMENTS + 1
MIB = 2**20


def encoded(kind, size=SIZE, **options):
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(buffer, format=kind, **options)
    return buffer.getvalue()


def png(extra, *, at=33):
    """A PNG file with more chunks, by default behind its header."""
    whole = encoded("PNG")
    return whole[:at] + extra + whole[at:]


def chunk(name, body=b""):
    checksum = zlib.crc32(name + body)
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)


def jpeg(extra):
    """A JPEG file with more segments behind its first one."""
    whole = encoded("JPEG")
    return whole[:20] + extra + whole[20:]


def segment(marker, body=b""):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body


def gif(extra):
    """A GIF file with more blocks behind its palette."""
    whole = encoded("GIF")
    start = 13 + (3 << (whole[10] & 7) + 1)
    return whole[:start] + extra + whole[start:]


def webp(extra):
    """A WebP file with more chunks behind its picture."""
    header = b"VP8X" + struct.pack("<I", 10) + bytes(4) + bytes([27, 0, 0, 27, 0, 0])
    body = b"WEBP" + header + encoded("WEBP")[12:] + extra
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_chunk(name, body=b""):
    return name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


def exif(num_entries):
    entry = struct.pack("<HHL4s", 0x010F, 2, 4, b"abc\0")
    return b"II*\0\x08\0\0\0" + struct.pack("<H", num_entries) + entry * num_entries + bytes(4)


def run_length_bmp():
    whole = bytearray(encoded("BMP"))
    whole[30] = 1
    return bytes(whole)


def png_in_pieces(num_pieces):
    pixels = zlib.compress((b"\0" + bytes(3 * 28)) * 28)
    whole = encoded("PNG")
    return whole[:33] + chunk(b"IDAT") * num_pieces + chunk(b"IDAT", pixels) + whole[-12:]


def tiny_frames(num_frames):
    image = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0"
    return b"GIF89a\x1c\0\x1c\0\0\0\0" + image * num_frames + b";"


COMPRESSED_MIB = zlib.compress(bytes(MIB - 1))
BOMBS = {
    "png_texts": png(chunk(b"tEXt", b"a\0b") * MANY),
    "png_texts_behind_the_pixels": png(chunk(b"tEXt", b"a\0b") * MANY, at=-12),
    "png_unknown_chunks": png(chunk(b"xxXx") * MANY),
    "png_empty_pieces": png_in_pieces(MANY + 10),
    "png_long_text": png(chunk(b"tEXt", b"a\0" + b"b" * MAX_METADATA_BYTES)),
    "png_compressed_profiles": png(chunk(b"iCCP", b"a\0\0" + COMPRESSED_MIB) * 5),
    "png_compressed_texts": png(chunk(b"zTXt", b"a\0\0" + COMPRESSED_MIB) * 5),
    "png_compressed_unicode": png(chunk(b"iTXt", b"a\0\1\0\0\0" + COMPRESSED_MIB) * 5),
    "png_exif_directory": png(chunk(b"eXIf", exif(MANY))),
    "jpeg_applications": jpeg(segment(0xE5) * MANY),
    "jpeg_comments": jpeg(segment(0xFE) * MANY),
    "jpeg_junk": jpeg(bytes(MANY)),
    "jpeg_filling": jpeg(b"\xff" * MANY),
    "jpeg_escaped_zeros": jpeg(b"\xff\0" * MANY),
    "jpeg_restarts": jpeg(b"\xff\xd0" * MANY),
    "jpeg_long_segments": jpeg(segment(0xED, b"Photoshop 3.0\0" + bytes(65_000)) * 65),
    "jpeg_blocks_of_photoshop": jpeg(
        segment(0xED, b"Photoshop 3.0\0" + (b"8BIM" + bytes(8)) * MANY)
    ),
    "jpeg_tables": jpeg(segment(0xDB, (b"\0" + b"\1" * 64) * 900) * 2),
    "jpeg_frames": jpeg(segment(0xC0, b"\x08\0\x1c\0\x1c\1" + b"\1\x11\0" * 20_000) * 2),
    "jpeg_exif_directory": jpeg(segment(0xE1, b"Exif\0\0" + exif(MANY))),
    "jpeg_exif_in_two_segments": jpeg(
        segment(0xE1, b"Exif\0\0" + exif(MANY)[:99]) + segment(0xE1, b"Exif\0\0" + exif(MANY)[99:])
    ),
    "jpeg_directory_of_pictures": jpeg(segment(0xE2, b"MPF\0" + exif(MANY))),
    "jpeg_marker_without_a_length": jpeg(b"\xff\xf0" * 3),
    "gif_comments": gif(b"!\xfe\1a\0" * MANY),
    "gif_comment_in_pieces": gif(b"!\xfe" + b"\1a" * MANY + b"\0"),
    "gif_junk": gif(bytes(MANY)),
    "gif_extension_without_an_end": gif(b"!\1\0" + b"\1a" * MANY + b"\0"),
    "gif_loop_without_an_end": gif(b"!\xff\x0bNETSCAPE2.0\0" + b"\1a" * MANY + b"\0"),
    "gif_frames": tiny_frames(MAX_FRAMES + 1),
    "webp_unknown_chunks": webp(webp_chunk(b"abcd") * MANY),
    "webp_long_profile": webp(webp_chunk(b"ICCP", bytes(MAX_METADATA_BYTES + 1))),
    "webp_exif_directory": webp(webp_chunk(b"EXIF", exif(MANY))),
    "webp_frames": webp(webp_chunk(b"ANMF", bytes(16)) * (MAX_FRAMES + 1)),
    "bmp_run_lengths": run_length_bmp(),
    "tiff": encoded("TIFF"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_a_decoder_opens_it(name, monkeypatch):
    opened = []
    monkeypatch.setattr(Image, "open", lambda *_, **__: opened.append(name))
    with pytest.raises(ConfigError) as caught:
        check_image(BOMBS[name], WHERE, ImageLimits())
    assert caught.value.key == WHERE and not opened


def progressive(num_scans, size):
    """A JPEG file that repeats its last scan."""
    whole = encoded("JPEG", size, progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    num_own = whole.count(b"\xff\xda")
    return whole[:-2] + last * (num_scans - num_own) + whole[-2:]


def test_scans_count_with_their_pixels():
    size, limits = (500, 500), ImageLimits(max_file_pixels=250_000)
    assert check_image(progressive(20, size), WHERE, limits, decode=True) == "JPEG"
    assert read_container(progressive(20, size)).num_scans == 20
    hidden = progressive(20, size)
    last = hidden.rindex(b"\xff\xda")
    hidden = hidden[:last] + b"\xff\x01" + segment(0xE5, b"\xff\xd9") + hidden[last:]
    assert read_container(hidden).num_scans == 20
    with pytest.raises(ConfigError) as caught:
        check_image(progressive(400, (1200, 1200)), WHERE, ImageLimits())
    assert caught.value.got == f"{400 * 1200 * 1200} pixels in 400 frames or scans"


def test_a_file_much_larger_than_its_pixels_is_refused():
    data = encoded("PNG") + bytes(MAX_METADATA_BYTES)
    assert check_image(data, WHERE, ImageLimits()) == "PNG"
    with pytest.raises(ConfigError) as caught:
        check_image(data + bytes(16 * 28 * 28), WHERE, ImageLimits())
    assert caught.value.got == f"{len(data) + 16 * 28 * 28} bytes for 784 pixels"


def with_profile(marker, size):
    """The segments of a colour profile for print."""
    step = 65_000
    count = -(-size // step)
    return b"".join(
        segment(marker, b"ICC_PROFILE\0" + bytes([number + 1, count]) + bytes(step))
        for number in range(count)
    )


HONEST = {
    "png_with_100_texts": png(b"".join(chunk(b"tEXt", b"a%d\0b" % n) for n in range(100))),
    "png_with_a_profile": png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(500_000)))),
    "png_with_exif": png(chunk(b"eXIf", exif(60))),
    "png_with_exif_as_text": png(
        chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  42\n" + exif(60).hex().encode())
    ),
    "jpeg_for_print": jpeg(with_profile(0xE2, 3 * MIB)),
    "jpeg_of_a_camera": jpeg(segment(0xE1, b"Exif\0\0" + exif(60)) + segment(0xDB)[:2] + b"\0\2"),
    "jpeg_with_a_preview_behind_it": encoded("JPEG") + encoded("JPEG", progressive=True) * 20,
    "jpeg_with_some_filling": jpeg(b"\xff" * 16),
    "gif_with_a_comment": gif(b"!\xfe" + (b"\xff" + b"a" * 255) * 100 + b"\0"),
    "webp_with_metadata": webp(webp_chunk(b"EXIF", exif(60)) + webp_chunk(b"XMP ", bytes(99_999))),
}


@pytest.mark.parametrize("name", HONEST)
def test_metadata_of_cameras_and_editors_change_nothing(name):
    data = HONEST[name]
    kind = name.partition("_")[0].upper()
    assert check_image(data, WHERE, ImageLimits(), decode=True) == kind
    np.testing.assert_array_equal(decode_rgb(data), decode_rgb(encoded(kind)))


def test_a_picture_of_two_is_a_jpeg_file():
    """Cameras store a preview behind the picture; Pillow calls such a file MPO."""
    buffer = io.BytesIO()
    pictures = [Image.new("RGB", SIZE, colour) for colour in ("red", "lime")]
    pictures[0].save(buffer, format="MPO", save_all=True, append_images=pictures[1:])
    assert check_image(buffer.getvalue(), WHERE, ImageLimits(), decode=True) == "JPEG"


def animation(kind, seed, num_frames=9, size=(24, 16)):
    """An animation with changing regions, transparency and durations, and the durations."""
    rng = np.random.default_rng(seed)
    frames, picture = [], Image.new("RGBA", size, "white")
    for _ in range(num_frames):
        left, top = (int(rng.integers(0, side - 4)) for side in size)
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        picture = picture.copy()
        picture.paste((*colour, 255), (left, top, left + 4, top + 4))
        frames.append(picture)
    durations = [int(value) * 10 for value in rng.integers(1, 60, num_frames)]
    buffer = io.BytesIO()
    options = {"disposal": int(rng.integers(0, 3))} if kind != "WEBP" else {"lossless": True}
    frames[0].save(
        buffer,
        format=kind,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        **options,
    )
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ANIMATION_FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_durations_and_frames_are_those_of_pillow(kind, seed):
    data = animation(kind, seed)
    durations, pictures = [], []
    with Image.open(io.BytesIO(data)) as image:
        for frame in ImageSequence.Iterator(image):
            background = Image.new("RGBA", frame.size, "white")
            background.paste(frame, mask=frame.convert("RGBA"))
            pictures.append(np.asarray(background.convert("RGB")))
            durations.append(float(frame.info["duration"]))
    assert read_container(data).durations_ms == durations
    found = animation_frames(data, WHERE, ImageLimits(), fps=1000, max_frames=10_000)
    assert len(found) == len(pictures)
    for frame, picture in zip(found, pictures, strict=True):
        np.testing.assert_array_equal(decode_rgb(frame), picture)


def test_a_picture_before_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "lime", "blue")]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        format="PNG",
        save_all=True,
        append_images=frames[1:],
        duration=500,
        default_image=True,
    )
    assert read_container(buffer.getvalue()).durations_ms == [100.0, 500.0, 500.0]


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_frames_behind_the_last_one_used_are_not_decoded(kind):
    limits = ImageLimits(max_file_pixels=24 * 16)
    data = animation(kind, 0)
    durations = read_container(data).durations_ms
    cut = data[: len(data) * 9 // 10]
    first = animation_frames(cut, WHERE, limits, fps=1000 / sum(durations), max_frames=1)
    assert len(first) == 1


def test_frames_count_with_their_pixels(monkeypatch):
    monkeypatch.setattr(loader, "MAX_DECODED_PIXELS", 5 * 24 * 16)
    monkeypatch.setattr(loader, "MAX_PASSES", 1)
    limits = ImageLimits(max_file_pixels=24 * 16)
    with pytest.raises(ConfigError) as caught:
        animation_frames(animation("GIF", 0), WHERE, limits, fps=1000, max_frames=100)
    assert caught.value.got == f"{9 * 24 * 16} pixels in 9 frames or scans"


def test_a_frame_that_enlarges_the_picture_is_checked():
    """The second frame claims 65,535 x 65,535 pixels."""
    whole = tiny_frames(2)
    last = whole.rindex(b",")
    data = whole[: last + 5] + b"\xff\xff\xff\xff" + whole[last + 9 :]
    with pytest.raises(ConfigError) as caught:
        animation_frames(data, WHERE, ImageLimits(), fps=1000, max_frames=9)
    assert caught.value.key == WHERE
