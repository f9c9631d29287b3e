"""Any image file becomes upright 8-bit RGB on white, as vLLM's loader makes it."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from mega_agentrl.vision.loader import ImageLimits, animation_frames, decode_rgb, shown_size
from mega_agentrl.vision.processor import ImageProcessor
from tests.vision_models import write_preprocessor_config

WHITE, BLACK, RED = (255, 255, 255), (0, 0, 0), (255, 0, 0)
ORIENTATION = ExifTags.Base.Orientation


def file_of(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def drawing(mode):
    """A black pixel on a transparent ground: 3 x 2 pixels, the pixel at (1, 0)."""
    image = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    return image.convert(mode)


def palette_drawing():
    image = Image.new("P", (3, 2), 1)
    image.putpalette([*BLACK, *BLACK])
    image.putpixel((1, 0), 0)
    return image


def grey(values, mode="I;16"):
    return Image.fromarray(np.array(values, dtype=np.uint16 if mode == "I;16" else np.uint8))


ON_WHITE = [[WHITE, BLACK, WHITE], [WHITE, WHITE, WHITE]]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(file_of(drawing("RGBA")), id="png_rgba"),
        pytest.param(file_of(drawing("LA")), id="png_la"),
        pytest.param(file_of(palette_drawing(), transparency=1), id="png_palette"),
        pytest.param(file_of(palette_drawing(), transparency=b"\xff\x00"), id="png_palette_alpha"),
        pytest.param(file_of(palette_drawing(), "GIF", transparency=1), id="gif"),
        pytest.param(file_of(drawing("RGBA"), "WEBP", lossless=True, exact=True), id="webp"),
        pytest.param(
            file_of(grey([[9, 0, 9], [9, 9, 9]], "L"), transparency=9), id="png_grey_value"
        ),
        pytest.param(file_of(grey([[9, 0, 9], [9, 9, 9]]), transparency=9), id="png_16_bit_value"),
    ],
)
def test_a_black_drawing_on_a_transparent_ground_is_black_on_white(data):
    assert np.asarray(decode_rgb(data)).tolist() == np.array(ON_WHITE).tolist()


def test_half_transparent_red_is_half_white():
    data = file_of(Image.new("RGBA", (1, 1), (255, 0, 0, 127)))
    assert decode_rgb(data).getpixel((0, 0)) == (255, 128, 128)


def test_16_bit_grey_keeps_its_upper_byte():
    data = file_of(grey([[0, 0x7FFF, 0xFFFF, 0x0100]]))
    assert np.asarray(decode_rgb(data))[0, :, 0].tolist() == [0, 0x7F, 0xFF, 1]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_as_its_exif_says(kind, orientation):
    """The red quarter of the shown image is at its top left."""
    shown = Image.new("RGB", (112, 56), "blue")
    shown.paste(RED, (0, 0, 56, 28))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that the camera made
    stored = shown.transpose(undo[orientation]) if orientation > 1 else shown
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = file_of(stored, kind, exif=exif)
    decoded = decode_rgb(data)
    assert shown_size(data) == decoded.size == (112, 56)
    corners = [decoded.getpixel(place)[0] > 127 for place in ((9, 9), (100, 9), (9, 46))]
    assert corners == [True, False, False]


def test_a_damaged_exif_block_is_ignored():
    data = file_of(Image.new("RGB", (3, 2), RED), exif=b"Exif\0\0broken")
    assert shown_size(data) == (3, 2)
    assert decode_rgb(data).getpixel((0, 0)) == RED


def test_measured_and_loaded_sizes_are_those_of_the_upright_image(tmp_path):
    write_preprocessor_config(tmp_path)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    processor = ImageProcessor(tmp_path)
    image = processor.measure(file_of(Image.new("RGB", (112, 56)), "JPEG", exif=exif))
    assert (image.width, image.height) == (56, 112)
    _, rows, columns = image.grid_thw
    assert rows == 2 * columns
    height, width, _ = processor.load(image).pixels_HWC.shape
    assert (height, width) == (rows * processor.patch_size, columns * processor.patch_size)


def test_a_reduced_image_keeps_its_shape():
    data = file_of(Image.new("RGB", (400, 200), RED), "JPEG")
    assert decode_rgb(data, max_side=50).size == (50, 25)


def test_frames_of_an_animation_are_laid_on_white():
    frames = [drawing("RGBA").resize((30, 20), Image.Resampling.NEAREST) for _ in range(2)]
    frames[1].putpixel((0, 19), (0, 0, 0, 255))
    data = file_of(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=500)
    found = animation_frames(data, "here", ImageLimits(), fps=2, max_frames=4)
    assert [decode_rgb(frame).getpixel((0, 0)) for frame in found] == [WHITE, WHITE]
    assert [decode_rgb(frame).getpixel((15, 5)) for frame in found] == [BLACK, BLACK]


def vllm_images():
    """vLLM's module of image conversions, which needs nothing but Pillow, without vLLM itself."""
    folders = importlib.util.find_spec("vllm").submodule_search_locations
    path = Path(folders[0]) / "multimodal" / "image.py"
    spec = importlib.util.spec_from_file_location("vllm_images", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_image(mode, size=(31, 17)):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)


MODES_BY_FORMAT = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
}


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind, modes in MODES_BY_FORMAT.items() for mode in modes]
)
def test_pixels_are_those_of_vllms_loader(kind, mode, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}
    data = file_of(random_image(mode), kind, **options)
    vllm = vllm_images()
    image = vllm.normalize_image(vllm.open_image(io.BytesIO(data)))
    expected = vllm.convert_image_mode(image, "RGB")
    np.testing.assert_array_equal(np.asarray(decode_rgb(data)), np.asarray(expected))
