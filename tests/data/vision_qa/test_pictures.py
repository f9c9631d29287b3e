"""Pictures as the model reads them: the figure is visible, the fine print of a sign is not."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from mega_agentrl.data.generated.vision_model import write_preprocessor_config
from mega_agentrl.data.vision_qa.pictures import (
    FIGURE_COLOURS,
    GRAY,
    MODEL_SIZE,
    SIGN_COLOURS,
    Figure,
    Place,
    Shape,
    crop_quarter,
    make_picture,
)
from mega_agentrl.vision.processor import ImageProcessor

FIGURES = [Figure(*parts) for parts in product(Shape, FIGURE_COLOURS, Place)]


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Return a function from an image file to the pixels that the model reads."""
    folder = tmp_path_factory.mktemp("processor")
    write_preprocessor_config(folder)
    processor = ImageProcessor(folder)

    def read_file(data):
        image = processor.load(processor.measure(data))
        assert image.pixels_HWC.shape == (MODEL_SIZE, MODEL_SIZE, 3) and image.num_tokens == 4
        return image.pixels_HWC.astype(int)

    return read_file


def quarter(pixels, place):
    left, top, right, bottom = (side // 2 for side in place.box)
    return pixels[top:bottom, left:right]


@pytest.mark.parametrize("seed", range(3))
def test_the_figure_is_seen_and_signs_are_not(read, seed):
    rng = random.Random(seed)
    for figure in FIGURES:
        picture = make_picture(figure, rng)
        pixels = read(picture.draw())
        # The middle of every shape has its colour.
        area = picture.figure_area
        middle = (area.top + area.size // 2) // 2, (area.left + area.size // 2) // 2
        assert tuple(pixels[middle]) == FIGURE_COLOURS[figure.colour]
        for place in set(Place) - {figure.place}:
            assert np.abs(quarter(pixels, place) - GRAY).max() <= 6, (figure, place)


def test_a_quarter_shows_the_colour_of_its_sign(read):
    rng = random.Random(0)
    for figure in FIGURES:
        picture = make_picture(figure, rng)
        data = picture.draw()
        for place, colour in picture.signs.items():
            pixels = read(crop_quarter(data, place)).reshape(-1, 3)
            shown = {name for name in SIGN_COLOURS if (pixels == SIGN_COLOURS[name]).all(1).any()}
            assert shown == {colour}


def test_signs_differ_in_colour_and_never_cover_the_figure():
    rng = random.Random(0)
    for figure in FIGURES:
        picture = make_picture(figure, rng)
        assert len(set(picture.signs.values())) == len(picture.signs) == 2
        assert figure.place not in picture.signs
        for place, area in (*picture.sign_areas.items(), (figure.place, picture.figure_area)):
            left, top, right, bottom = place.box
            assert left < area.left and area.left + area.size < right
            assert top < area.top and area.top + area.size < bottom


def test_blank_pictures_are_gray():
    pictures = [make_picture(figure, random.Random(0), is_blank=True) for figure in FIGURES]
    (data,) = {picture.draw() for picture in pictures}
    assert data != make_picture(FIGURES[0], random.Random(0)).draw()
