"""Turns an answer of a server into what the policy reads.

Texts and embedded texts are joined by newlines. Images become images of the response, or a note for
a model of text. Sounds, other files and links to resources become notes. An answer without content
but with structured content is shown as JSON. `isError` is an error of the policy, which reads the
message.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING

import mcp_types

from mega_agentrl.tool.base import ToolResponse
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY_ANSWER_MESSAGE = "The tool returned an empty answer."

_DECODED_AT_ONCE = 1 << 20
"""Characters of base 64, a multiple of 4."""


def count_chars(result: mcp_types.CallToolResult) -> int:
    """Return the length of the texts and files in an answer."""
    num_chars = 0
    for block in result.content:
        content = block.resource if isinstance(block, mcp_types.EmbeddedResource) else block
        num_chars += sum(
            len(getattr(content, name, None) or "") for name in ("text", "data", "blob")
        )
    return num_chars


def to_response(
    result: mcp_types.CallToolResult, *, shows_images: bool, redact: Callable[[str], str]
) -> ToolResponse:
    """Return the response of a call, with the whole text.

    Args:
        result: The server's answer.
        shows_images: Whether the model sees images.
        redact: Takes what no message may contain out of a text.
    """
    texts: list[str] = []
    images: list[bytes] = []
    for block in result.content:
        data = _image_data(block) if shows_images else None
        if data is not None:
            images.append(data)
        else:
            texts.append(_as_text(block))
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = redact("\n".join(texts))
    return ToolResponse(
        text=text or ("" if images else EMPTY_ANSWER_MESSAGE),
        status=ToolStatus.user_error if result.is_error else ToolStatus.ok,
        images=tuple(images),
    )


def _image_data(block: mcp_types.ContentBlock) -> bytes | None:
    """Return the image file in a block, or None if it holds none."""
    match block:
        case mcp_types.ImageContent(data=data):
            encoded = data
        case mcp_types.EmbeddedResource(
            resource=mcp_types.BlobResourceContents(mime_type=str(kind), blob=data)
        ) if kind.startswith("image/"):
            encoded = data
        case _:
            return None
    try:
        # In parts, between which other threads run.
        parts = range(0, len(encoded), _DECODED_AT_ONCE)
        return b"".join(
            base64.b64decode(encoded[start : start + _DECODED_AT_ONCE], validate=True)
            for start in parts
        )
    except (binascii.Error, ValueError):
        return None


def _as_text(block: mcp_types.ContentBlock) -> str:
    match block:
        case mcp_types.TextContent(text=text):
            return text
        case mcp_types.ImageContent(mime_type=kind) | mcp_types.AudioContent(mime_type=kind):
            return f"[{kind} not shown]"
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents(text=text)):
            return text
        case mcp_types.EmbeddedResource(resource=resource):
            return f"[{resource.mime_type or 'file'} {resource.uri} not shown]"
        case mcp_types.ResourceLink(uri=uri, name=name):
            return f"[resource {name}: {uri}]"
