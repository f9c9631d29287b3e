"""Zoom cuts what was asked for, refuses other boxes, and sees the images of its own path."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.sections.tools import ZoomToolConfig
from mega_agentrl.tool.base import Tool, ToolInputError, ToolResponse
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.zoom import ZoomTool, region
from mega_agentrl.types.images import ImageInput
from mega_agentrl.types.records import ToolStatus
from mega_agentrl.vision.loader import ImageLimits, check_image


def picture(width, height, name="a"):
    """An image whose pixel (x, y) has the colour (x, y, 0)."""
    y, x = np.indices((height, width), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.stack([x, y, 0 * x], -1)).save(buffer, format="PNG")
    return ImageInput(
        image_id=name,
        data=buffer.getvalue(),
        width=width,
        height=height,
        grid_thw=(1, 2, 2),
        merge_size=2,
    )


async def open_session(*images, **config):
    settings = {"enabled": True, "min_side": 1} | config
    kit = ToolKit([ZoomTool(ZoomToolConfig(**settings))], protocol=CallProtocol.hermes)
    session = kit.open_session()
    await session.create({})
    session.show_images(images)
    return session


async def zoom(session, **arguments):
    return await session.execute("zoom", arguments)


def pixels(outcome):
    (data,) = outcome.images
    return np.asarray(Image.open(io.BytesIO(data)))


async def test_the_region_is_that_of_the_file():
    session = await open_session(picture(60, 40))
    found = pixels(await zoom(session, image=1, box=[10, 5, 14, 8]))
    assert found.shape == (3, 4, 3)
    assert found[0, 0].tolist() == [10, 5, 0] and found[-1, -1].tolist() == [13, 7, 0]
    partial = pixels(await zoom(session, image=1, box=[10.4, 5.9, 13.2, 7.1]))
    np.testing.assert_array_equal(partial, found)


@pytest.mark.parametrize(
    ("box", "scale", "size"),
    [
        ([0, 0, 20, 10], None, (40, 20)),
        ([0, 0, 60, 40], None, (60, 40)),
        ([0, 0, 60, 2], None, (80, 3)),
        ([0, 0, 20, 10], 3, (60, 30)),
        ([0, 0, 20, 10], 30, (80, 40)),
        ([0, 0, 20, 10], 0.5, (10, 5)),
    ],
    ids=["to_min_side", "as_it_is", "to_max_side", "by_scale", "scale_too_large", "reduced"],
)
async def test_a_region_is_enlarged_within_the_bounds(box, scale, size):
    session = await open_session(picture(60, 40), min_side=20, max_side=80)
    arguments = {"image": 1, "box": box} | ({"scale": scale} if scale else {})
    assert pixels(await zoom(session, **arguments)).shape[:2] == size[::-1]


@pytest.mark.parametrize(
    "box",
    [
        [10, 5, 10, 8],
        [14, 5, 10, 8],
        [-1, 0, 5, 5],
        [0, 0, 61, 5],
        [0, 39, 5, 41],
        [0, 0, 5],
        ["a", 0, 5, 5],
        [float("nan"), 0, 5, 5],
    ],
    ids=["empty", "reversed", "negative", "right", "bottom", "three", "text", "nan"],
)
async def test_other_boxes_are_the_policys_errors(box):
    session = await open_session(picture(60, 40))
    outcome = await zoom(session, image=1, box=box)
    assert outcome.status is ToolStatus.user_error and not outcome.images


def test_a_line_is_no_region():
    with pytest.raises(ToolInputError):
        region([0, 0, 201, 1], 300, 300, 1)
    assert region([0, 0, 200, 1], 300, 300, 1) == (0, 0, 200, 1)


@pytest.mark.parametrize(
    "sides",
    [(190, 1), (390, 2), (1000, 5), (1, 190)],
    ids=["one_row", "two_rows", "five_rows", "one_column"],
)
async def test_an_elongated_region_can_be_shown(sides):
    """By hand: 190 x 1 is enlarged 5.39 times, to 1024 x 5, which is more than 200 : 1."""
    session = await open_session(picture(*sides), min_side=224, max_side=1024)
    (data,) = (await zoom(session, image=1, box=[0, 0, *sides])).images
    check_image(data, "zoom", ImageLimits())


async def test_the_number_of_the_image_may_be_written_as_a_float():
    outcome = await zoom(await open_session(picture(60, 40)), image=1.0, box=[0, 0, 9, 9])
    assert outcome.status is ToolStatus.ok and "of image 1, which" in outcome.answer


async def test_a_fork_has_the_images_before_it_and_not_those_of_its_parent():
    parent = await open_session(picture(60, 40))
    child = await parent.fork()
    parent.show_images([picture(30, 30, "b")])
    child.show_images([picture(20, 20, "c"), picture(10, 10, "d")])
    box = [0, 0, 25, 25]
    assert pixels(await zoom(parent, image=2, box=box)).shape == (25, 25, 3)
    assert "image 2, which has 20 x 20" in (await zoom(child, image=2, box=box)).answer
    assert "from 1 to 2" in (await zoom(parent, image=3, box=box)).answer
    assert (await zoom(child, image=3, box=[0, 0, 9, 9])).status is ToolStatus.ok
    for number in (0, -1):
        assert (await zoom(child, image=number, box=box)).status is ToolStatus.user_error
    assert (await zoom(await open_session(), image=1, box=box)).status is ToolStatus.user_error


async def test_a_tag_holds_the_arguments_as_json():
    kit = ToolKit([ZoomTool(ZoomToolConfig(enabled=True))], protocol=CallProtocol.tags)
    session = kit.open_session()
    await session.create({})
    session.show_images([picture(60, 40)])
    (call,) = kit.parse_calls('so <zoom>{"image": 1, "box": [0, 0, 9, 9]}</zoom>')
    assert (await session.execute(call.tool, call.arguments)).status is ToolStatus.ok


class Painter(Tool):
    name = "painter"
    text_argument = "text"

    def __init__(self, images):
        self._images = images

    async def execute(self, state, arguments, kwargs):
        assert "images" not in kwargs
        return ToolResponse(text="", images=self._images)


@pytest.mark.parametrize("images", [b"x", ["x"], (None,)], ids=["bytes", "text", "none"])
async def test_a_tool_that_returns_no_bytes_is_at_fault(images):
    kit = ToolKit([Painter(images)], protocol=CallProtocol.hermes)
    session = kit.open_session()
    await session.create({})
    outcome = await session.execute("painter", {"text": "x"})
    assert outcome.status is ToolStatus.infra_error and not outcome.images
