"""Enlarges a region of an image that the conversation has shown.

Arguments are the number of the image, counted from 1 over everything that the policy was shown, a
box `[left, top, right, bottom]` in pixels of that image's file, and optionally a scale. The answer
is the region as an image. It is cut from the file, so that it shows details that the model's
resized image lacks. With the tag protocol the text of the call is a JSON object::

    <zoom>{"image": 1, "box": [100, 40, 220, 90]}</zoom>
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from mega_agentrl.tool.base import Tool, ToolInputError, ToolResponse
from mega_agentrl.tool.function import run_in_thread
from mega_agentrl.tool.function_schema import ALL_ARGUMENTS_AS_JSON
from mega_agentrl.vision.loader import MAX_ASPECT_RATIO, decode_rgb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.sections.tools import ZoomToolConfig
    from mega_agentrl.types.images import ImageInput

MAX_SCALE = 32


class ZoomTool(Tool):
    """Crops and enlarges images; keeps no state."""

    name = "zoom"
    description = "Shows a region of an earlier image of this conversation, enlarged."
    text_argument = ALL_ARGUMENTS_AS_JSON
    reads_images = True
    max_concurrent = 8
    parameters = {  # noqa: RUF012  as in the base class
        "type": "object",
        "properties": {
            "image": {
                "type": "integer",
                "description": "Number of the image; 1 is the first of the conversation.",
            },
            "box": {
                "type": "array",
                "items": {"type": "number"},
                "minItems": 4,
                "maxItems": 4,
                "description": "Region in pixels of that image: left, top, right, bottom.",
            },
            "scale": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": MAX_SCALE,
                "description": "Magnification; by default one that makes a small region legible.",
            },
        },
        "required": ["image", "box"],
        "additionalProperties": False,
    }

    def __init__(self, config: ZoomToolConfig) -> None:
        self._config = config

    async def execute(
        self, state: None, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Return the region as an image."""
        number = int(arguments["image"])  # 1.0 is an integer in JSON schema
        image = _choose_image(kwargs["images"], number)
        box = region(arguments["box"], image.width, image.height, number)
        size = self._size(box, arguments.get("scale"))
        data = await run_in_thread(lambda: crop(image, box, size))
        text = (
            f"Region {list(box)} of image {number}, which has {image.width} x {image.height} "
            f"pixels, shown with {size[0]} x {size[1]} pixels."
        )
        return ToolResponse(text=text, images=(data,))

    def _size(self, box: tuple[int, int, int, int], scale: float | None) -> tuple[int, int]:
        """Return width and height in pixels of the enlarged region.

        Rounding may make the shorter side of an elongated region so short that the answer would be
        refused as too elongated; it is then a little longer.
        """
        width, height = box[2] - box[0], box[3] - box[1]
        factor = scale or max(1.0, self._config.min_side / min(width, height))
        factor = min(factor, self._config.max_side / max(width, height))
        width, height = round(width * factor), round(height * factor)
        least = max(1, math.ceil(max(width, height) / MAX_ASPECT_RATIO))
        return max(width, least), max(height, least)


def region(box: Sequence[float], width: int, height: int, number: int) -> tuple[int, int, int, int]:
    """Return the whole pixels that a box touches.

    Raises:
        ToolInputError: it is empty, leaves the image or is too elongated; the message is for the
            policy.
    """
    left, top, right, bottom = box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise ToolInputError(
            f"box {list(box)}: expected left < right and top < bottom within image {number}, "
            f"which has {width} x {height} pixels."
        )
    found = (math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom))
    sides = (found[2] - found[0], found[3] - found[1])
    if max(sides) > MAX_ASPECT_RATIO * min(sides):
        raise ToolInputError(
            f"box {list(box)}: one side is more than {MAX_ASPECT_RATIO} times as long as the other."
        )
    return found


def crop(image: ImageInput, box: tuple[int, int, int, int], size: tuple[int, int]) -> bytes:
    """Return a region of the image's file, resized, as a PNG file; the same bytes each time."""
    from PIL import Image

    buffer = io.BytesIO()
    part = decode_rgb(image.read()).crop(box)
    part.resize(size, Image.Resampling.BICUBIC).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _choose_image(images: Sequence[ImageInput], number: int) -> ImageInput:
    if not images:
        raise ToolInputError("There is no image in this conversation.")
    if not 1 <= number <= len(images):
        raise ToolInputError(f"There is no image {number}; choose one from 1 to {len(images)}.")
    return images[number - 1]
