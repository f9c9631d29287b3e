"""Images in the requests of a session: checked once, kept once, and bounded in bytes."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError, invalid_request
from mega_agentrl.rollout.gateway.work_threads import MAX_MEDIUM_BYTES
from mega_agentrl.vision.placeholders import content_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.rollout.gateway.chat import ChatRequest
    from mega_agentrl.types.images import ImageInput
    from mega_agentrl.types.protocols import ImageLoader
    from mega_agentrl.types.records import Message


class SessionImages:
    """The images of a session.

    Args:
        loader: Checks image files; None for a policy of text.
    """

    def __init__(self, loader: ImageLoader | None) -> None:
        self._loader = loader
        # A record lives as long as a block of the tree or a running request has it.
        self._by_digest: WeakValueDictionary[bytes, ImageInput] = WeakValueDictionary()
        self._ids: set[str] = set()
        """Images of the tree."""

    async def check(self, request: ChatRequest) -> ChatRequest:
        """Return the request with records of images in place of their files.

        Raises:
            GatewayError: the policy cannot be shown an image.
        """
        if not any(_has_files(message) for message in request.messages):
            return request
        if self._loader is None:
            expected = "text only; model.path is a model without a vision tower"
            raise invalid_request("messages", "an image", expected)
        messages = [
            await self._check_message(message, self._loader) if _has_files(message) else message
            for message in request.messages
        ]
        return replace(request, messages=tuple(messages))

    def new_bytes(self, images: Mapping[str, ImageInput]) -> int:
        """Return the size of those of these images, by id, that the tree does not have."""
        return sum(len(image.data) for name, image in images.items() if name not in self._ids)

    def add(self, images: Mapping[str, ImageInput]) -> None:
        """Note images that the tree has from now on."""
        self._ids.update(images)

    async def _check_message(self, message: Message, loader: ImageLoader) -> Message:
        parts = [
            {"type": "image", "image": await self._find_or_check(part["data"], loader)}
            if "data" in part
            else part
            for part in content_parts(message["content"])
        ]
        return {**message, "content": parts}

    async def _find_or_check(self, data: bytes, loader: ImageLoader) -> ImageInput:
        digest = await _digest(data)
        image = self._by_digest.get(digest)
        if image is None:
            try:
                image = await loader.check(data, "messages, image")
            except ValueError as error:
                raise GatewayError(ErrorKind.invalid_request, f"messages: {error}") from error
            self._by_digest[digest] = image
        return image


def _has_files(message: Message) -> bool:
    content: Any = message["content"]
    return isinstance(content, list) and any("data" in part for part in content)


async def _digest(data: bytes) -> bytes:
    def calculate() -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    return calculate() if len(data) <= MAX_MEDIUM_BYTES else await asyncio.to_thread(calculate)
