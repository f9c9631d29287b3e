"""The loader refuses files that are not images, names their place, and decodes no pixels before."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.vision.loader import (
    FORMATS,
    ImageLimits,
    animation_frames,
    check_image,
    choose_frames,
    image_bytes,
)
from mega_agentrl.vision.processor import ImageProcessor
from tests.config.refusals import refused
from tests.vision_models import make_picture, write_preprocessor_config

WHERE = "data.train=a.parquet row 3, column images[0]"


def encoded(kind, size=(56, 28), **options):
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(buffer, format=kind, **options)
    return buffer.getvalue()


def check(data, **limits):
    return check_image(data, WHERE, ImageLimits(**limits), decode=True)


def cell_bytes(cell, folder=None, fetch=None):
    return image_bytes(cell, WHERE, ImageLimits(), folder=folder, fetch=fetch)


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_claiming(width, height, *, extra=b"", body=b""):
    """A PNG file whose header claims this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", zlib.compress(body))
    return b"\x89PNG\r\n\x1a\n" + chunks + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_accepted_whatever_its_name(kind, tmp_path):
    (tmp_path / "wrong.mp4").write_bytes(encoded(kind))
    data, path = cell_bytes("wrong.mp4", tmp_path)
    assert check(data) == kind
    assert path == str(tmp_path / "wrong.mp4")


BROKEN = {
    "empty": b"",
    "text": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "tiff": encoded("TIFF"),
    "png_cut_in_half": make_picture(0)[: len(make_picture(0)) // 2],
    "png_without_pixels": make_picture(0)[:33],
    "jpeg_cut_in_half": encoded("JPEG", (560, 280))[:2000],
    "gif_cut": encoded("GIF")[:-200],
    "header_claims_more_rows": encoded("BMP")[:22] + b"\xff" + encoded("BMP")[23:],
    "header_claims_nothing": png_claiming(0, 64),
    "wrong_checksum": make_picture(0)[:20] + b"\xff" + make_picture(0)[21:],
    "a_line": encoded("PNG", (1, 30_000)),
    "bomb": png_claiming(40_000, 40_000),
    "large_bomb": png_claiming(2**31 - 1, 2**31 - 1),
    "compressed_text_bomb": png_claiming(
        8, 8, extra=png_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 80_000_000))
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_an_error_with_its_place(name):
    with pytest.raises(ConfigError) as caught:
        check(BROKEN[name])
    assert caught.value.key == WHERE


def test_rows_that_a_png_file_promises_and_lacks_are_black(tmp_path):
    """Pillow fills them; what counts is that pixels and number of features still agree."""
    data = png_claiming(56, 84, body=b"\0" + b"\xff" * 56 * 3)
    assert check(data) == "PNG"
    write_preprocessor_config(tmp_path)
    processor = ImageProcessor(tmp_path)
    image = processor.load(processor.measure(data))
    assert image.pixels_HWC.shape == (84, 56, 3) and image.grid_thw == (1, 6, 4)
    assert image.pixels_HWC[0].min() > 0 and image.pixels_HWC[8:].max() == 0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), st.data())
def test_damaged_files_never_raise_anything_else(kind, data):
    """Random bytes behind a signature, cut files and flipped bytes."""
    whole = bytearray(encoded(kind, (20, 10)))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    stop = data.draw(st.integers(0, len(whole)))
    damaged = bytes(whole[:stop]) + data.draw(st.binary(max_size=40))
    try:
        assert check(damaged) in FORMATS
    except ConfigError as error:
        assert error.key == WHERE


def test_bounds_name_their_settings():
    with pytest.raises(ConfigError) as caught:
        check(make_picture(0), max_file_bytes=1049)
    assert "data.max_image_mib=0.001" in caught.value.expected
    with pytest.raises(ConfigError) as caught:
        check(make_picture(0), max_file_pixels=1567)
    assert "data.max_image_pixels=1567" in caught.value.expected


def test_all_forms_of_a_cell_have_the_same_bytes(tmp_path):
    data = make_picture(0)
    file = tmp_path / "a.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    cells = (
        data,
        {"bytes": data, "path": None},
        {"bytes": None, "path": "a.png"},
        str(file),
        url,
        {"url": url},
        {"image_url": {"url": url}},
    )
    assert {cell_bytes(cell, tmp_path)[0] for cell in cells} == {data}
    fetched = []

    def fetch(address, where):
        fetched.append((address, where))
        return file

    assert cell_bytes("https://x.org/a.png", fetch=fetch) == (data, str(file))
    assert fetched == [("https://x.org/a.png", WHERE)]


@pytest.mark.parametrize(
    "cell",
    [None, 5, "", {}, "nowhere.png", "data:image/png,abc", "data:image/png;base64,?"],
    ids=["null", "number", "empty", "empty_struct", "no_file", "not_base64", "bad_base64"],
)
def test_a_cell_without_an_image_is_an_error(cell, tmp_path):
    with pytest.raises(ConfigError) as caught:
        cell_bytes(cell, tmp_path)
    assert caught.value.key == WHERE


def test_frames_are_those_shown_at_the_times_asked_for():
    assert choose_frames([400, 100, 500], fps=2, max_frames=9) == [0, 2]
    assert choose_frames([100] * 10, fps=10, max_frames=5) == [0, 2, 4, 6, 8]
    assert choose_frames([40], fps=2, max_frames=5) == [0]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_becomes_its_frames(kind):
    colours = ("red", "lime", "blue")
    frames = [Image.new("RGB", (40, 30), colour) for colour in colours]
    buffer = io.BytesIO()
    frames[0].save(
        buffer, format=kind, save_all=True, append_images=frames[1:], duration=500, lossless=True
    )
    found = animation_frames(buffer.getvalue(), WHERE, ImageLimits(), fps=2, max_frames=8)
    pixels = [Image.open(io.BytesIO(frame)).getpixel((5, 5)) for frame in found]
    assert pixels == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_another_container_says_how_to_convert_it():
    mp4 = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + b"\0" * 500
    error = refused(animation_frames, mp4, WHERE, ImageLimits(), fps=2, max_frames=8)
    assert error.key == WHERE and "ffmpeg" in error.expected
