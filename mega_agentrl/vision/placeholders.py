"""Images among tokens and in texts.

A chat template writes one placeholder for an image; `expand_placeholders` repeats it once for each
feature, and `locate_images` finds the runs again. In texts for people and rewards an image is shown
as a label, `[image 56 x 28]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mega_agentrl.errors import InputError
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.records import Message


def expand_placeholders(
    token_ids: Sequence[int], images: Sequence[ImageInput], placeholder_id: int
) -> list[int]:
    """Return the ids with the k-th placeholder repeated for each feature of the k-th image.

    Raises:
        ValueError: there are not as many placeholders as images.
    """
    num_placeholders = sum(token == placeholder_id for token in token_ids)
    if num_placeholders != len(images):
        raise InputError(
            f"image placeholders of the chat template (token {placeholder_id})",
            num_placeholders,
            f"{len(images)}, one for each image",
            "a template for text, which ignores the parts of a message that are images",
        )
    remaining = iter(images)
    expanded: list[int] = []
    for token in token_ids:
        count = next(remaining).num_tokens if token == placeholder_id else 1
        expanded += [token] * count
    return expanded


def locate_images(
    token_ids: Sequence[int], images: Sequence[ImageInput], placeholder_id: int
) -> tuple[PlacedImage, ...]:
    """Return where each of the images, in order, stands among expanded ids.

    Raises:
        ValueError: the placeholders among the ids are not exactly those of the images.
    """
    placed: list[PlacedImage] = []
    position = 0
    for image in images:
        while position < len(token_ids) and token_ids[position] != placeholder_id:
            position += 1
        placed.append(PlacedImage(start=position, image=image))
        position += image.num_tokens
    expected = [index for item in placed for index in range(item.start, item.stop)]
    got = [index for index, token in enumerate(token_ids) if token == placeholder_id]
    if got != expected:
        raise InputError(
            f"image placeholders among {len(token_ids)} token ids",
            len(got),
            f"{len(expected)} in whole runs for {[image.num_tokens for image in images]} features",
            "a cut through an image, or a sampled placeholder",
        )
    return tuple(placed)


def image_parts(messages: Sequence[Message]) -> list[ImageInput]:
    """Return the images of messages in order."""
    parts = (part for message in messages for part in content_parts(message.get("content", "")))
    return [part["image"] for part in parts if isinstance(part.get("image"), ImageInput)]


def content_parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": str(content)}]


def content_text(content: Any) -> str:
    """Return the content of a message as text, with labels for images."""
    if not isinstance(content, list):
        return str(content)
    return "".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    image = part.get("image") if isinstance(part, dict) else None
    if isinstance(image, ImageInput):
        return image_label(image)
    return str(part["text"] if isinstance(part, dict) and "text" in part else part)


def image_label(image: ImageInput) -> str:
    """Return the text that stands for an image, with the size of its file in pixels."""
    return f"[image {image.width} x {image.height}]"


def split_at_labels(text: str, images: Sequence[ImageInput]) -> list[dict[str, Any]]:
    """Return a text with the labels of these images, in order, as parts of a message.

    An image whose label is missing, because the text was edited, precedes what is left of it.
    """
    parts: list[dict[str, Any]] = []
    for image in images:
        before, label, after = text.partition(image_label(image))
        if label:
            parts += [{"type": "text", "text": before}] if before else []
            text = after
        parts.append({"type": "image", "image": image})
    return [*parts, *([{"type": "text", "text": text}] if text else [])]
