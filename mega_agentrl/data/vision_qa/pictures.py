"""Pictures of the vision task: one large figure, and two small signs in fine print.

A picture is gray and `PICTURE_SIZE` pixels wide and high. The model reads it reduced to half the
size (`MODEL_SIZE`, which is `data.max_pixels` of the experiment). The figure stays clearly visible.
A sign is a chessboard of single pixels in a colour and its complement, whose mean is the gray of
the background, so that it vanishes when the picture is reduced. A quarter of the picture, which the
tool `zoom` shows in full resolution, shows the sign::

    +---------+---------+
    |         |   ##    |   figure: a disc, a square or a triangle of one of `FIGURE_COLOURS`
    |  :::    |  ####   |   at the top right
    |  :::    |   ##    |
    +---------+---------+   signs (:::) of two of `SIGN_COLOURS`, one at the top left and one at
    |   :::   |         |   the bottom left
    |   :::   |         |
    +---------+---------+
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

PICTURE_SIZE = 112
"""Width and height of a picture in pixels."""
MODEL_SIZE = PICTURE_SIZE // 2
"""Width and height of the reduced picture that the model reads, and of a quarter."""
GRAY = (128, 128, 128)
FIGURE_COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 160, 0),
    "blue": (0, 0, 255),
    "orange": (255, 140, 0),
    "purple": (150, 0, 200),
    "black": (0, 0, 0),
}
SIGN_COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "black": (0, 0, 0),
}
_MARGIN = 2
_FIGURE_SIZES = range(32, 45, 2)
_SIGN_SIZES = range(24, 39, 2)


class Shape(StrEnum):
    """Shapes of the large figure."""

    disc = "disc"
    square = "square"
    triangle = "triangle"


class Place(StrEnum):
    """Quarters of a picture."""

    top_left = "top left"
    top_right = "top right"
    bottom_left = "bottom left"
    bottom_right = "bottom right"

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the quarter in pixels of the picture."""
        row, column = divmod(list(Place).index(self), 2)
        left, top = column * MODEL_SIZE, row * MODEL_SIZE
        return left, top, left + MODEL_SIZE, top + MODEL_SIZE


@dataclass(frozen=True, slots=True)
class Figure:
    """Kind of the large figure; the splits of the task share none."""

    shape: Shape
    colour: str
    place: Place


@dataclass(frozen=True, slots=True)
class Square:
    """An area of a picture in pixels; all numbers are even, so that chessboards reduce to gray."""

    left: int
    top: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture before it is drawn."""

    figure: Figure
    figure_area: Square
    signs: Mapping[Place, str]
    """Colour of the sign in each quarter that has one."""
    sign_areas: Mapping[Place, Square]
    is_blank: bool = False
    """Whether nothing is drawn, to test that answers come from the picture."""

    def draw(self) -> bytes:
        """Return the picture as a PNG file."""
        from PIL import Image

        image = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), GRAY)
        if not self.is_blank:
            _draw_figure(image, self.figure, self.figure_area)
            for place, colour in self.signs.items():
                _draw_sign(image, colour, self.sign_areas[place])
        return _png(image)


def make_picture(figure: Figure, rng: random.Random, *, is_blank: bool = False) -> Picture:
    """Return a picture of the figure and of two random signs in other quarters."""
    places = rng.sample([place for place in Place if place is not figure.place], 2)
    colours = rng.sample(list(SIGN_COLOURS), 2)
    return Picture(
        figure=figure,
        figure_area=_random_area(figure.place, rng.choice(_FIGURE_SIZES), rng),
        signs=dict(zip(places, colours, strict=True)),
        sign_areas={place: _random_area(place, rng.choice(_SIGN_SIZES), rng) for place in places},
        is_blank=is_blank,
    )


def crop_quarter(picture: bytes, place: Place) -> bytes:
    """Return a quarter of a picture in full resolution, both as PNG files."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        return _png(image.crop(place.box))


def _random_area(place: Place, size: int, rng: random.Random) -> Square:
    left, top, _, _ = place.box
    offsets = range(_MARGIN, MODEL_SIZE - size - _MARGIN + 1, 2)
    return Square(left + rng.choice(offsets), top + rng.choice(offsets), size)


def _draw_figure(image: Image.Image, figure: Figure, area: Square) -> None:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(image)
    colour = FIGURE_COLOURS[figure.colour]
    right, bottom = area.left + area.size - 1, area.top + area.size - 1
    match figure.shape:
        case Shape.square:
            draw.rectangle((area.left, area.top, right, bottom), fill=colour)
        case Shape.disc:
            draw.ellipse((area.left, area.top, right, bottom), fill=colour)
        case Shape.triangle:
            peak = (area.left + area.size // 2, area.top)
            draw.polygon([(area.left, bottom), (right, bottom), peak], fill=colour)


def _draw_sign(image: Image.Image, colour: str, area: Square) -> None:
    red, green, blue = SIGN_COLOURS[colour]
    complement = (255 - red, 255 - green, 255 - blue)
    for y in range(area.top, area.top + area.size):
        for x in range(area.left, area.left + area.size):
            image.putpixel((x, y), complement if (x + y) % 2 else (red, green, blue))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
