"""A tool that answers with an image: `tool.user_tools_file=examples/my_image_tools.yaml`."""

import io
from collections.abc import Mapping
from typing import Any

from mega_agentrl.tool.base import Tool, ToolInputError, ToolResponse
from mega_agentrl.tool.function import run_in_thread
from mega_agentrl.vision.loader import decode_rgb


class Rotate(Tool):
    """Rotates images."""

    name = "rotate"
    description = "Shows an earlier image of this conversation, rotated clockwise."
    text_argument = "*"  # with the tag protocol, a text that is a JSON object of all arguments
    reads_images = True

    def __init__(self) -> None:
        number = {"type": "integer", "description": "Number of the image, from 1."}
        self.parameters = {
            "type": "object",
            "properties": {"image": number, "degrees": {"enum": [90, 180, 270]}},
            "required": ["image", "degrees"],
        }

    async def execute(
        self, state: None, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Return an image that the policy has been shown, rotated."""
        images, number = kwargs["images"], int(arguments["image"])  # JSON may have 1.0 for 1
        degrees = arguments["degrees"]
        if not 1 <= number <= len(images):
            raise ToolInputError(f"There is no image {number}, only 1 to {len(images)}.")
        data = await run_in_thread(lambda: rotate(images[number - 1].read(), degrees))
        return ToolResponse(text=f"Rotated by {degrees} degrees.", images=(data,))


def rotate(data: bytes, degrees: int) -> bytes:
    """Return a PNG file of the image, rotated clockwise."""
    buffer = io.BytesIO()
    decode_rgb(data).rotate(-degrees, expand=True).save(buffer, format="PNG")
    return buffer.getvalue()
