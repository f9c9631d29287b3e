"""Tokenizes conversations, in several processes if there are many.

A tokenizer encodes about 2,000 prompts per second and holds the GIL between calls. A worker process
needs up to 10 s to import it, so processes pay off from `MIN_PARALLEL_ROWS` on. Conversations are
sent in chunks with a timeout each; the results keep the order. A failed, dead or late worker is an
error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.worker_pool import WorkerCallError, WorkerPool
from mega_agentrl.types.images import ImageInput
from mega_agentrl.vision.placeholders import content_parts

if TYPE_CHECKING:
    from mega_agentrl.types.protocols import ChatCodec
    from mega_agentrl.types.records import Message

MIN_PARALLEL_ROWS = 50_000
"""Number of prompts from which processes are started: 25 s for one process at 370 tokens each."""

MAX_WORKERS = 16
"""Upper limit of processes, beyond which the process that feeds them is the bottleneck."""

_CHUNK_ROWS = 1000
_CHUNK_CHARS = 2_000_000
"""Far below the size limit of a worker call."""

_TIMEOUT_S = 300.0
_WORKER_FUNCTION = "mega_agentrl.data.encoding.parallel_encode:encode_chunk"

ConversationWithTools = tuple[Sequence["Message"], Sequence[Mapping[str, Any]]]
"""Messages, and the schemas of the tools that the chat template renders."""


def encode_conversations(
    codec: ChatCodec,
    conversations: Sequence[ConversationWithTools],
    *,
    key: str,
    min_rows: int = MIN_PARALLEL_ROWS,
) -> list[list[int]]:
    """Return the token ids of each conversation with its generation prompt.

    Args:
        codec: the tokenizer and chat template; worker processes recreate it from its `folder`; a
            codec without a folder encodes all conversations in this process.
        conversations: messages with tool schemas.
        key: configuration key of the conversations, for error messages.
        min_rows: number of conversations from which several processes are used.

    Raises:
        InputError: a worker process failed.
    """
    num_workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    folder = getattr(codec, "folder", None)
    if len(conversations) < min_rows or num_workers < 2 or folder is None:
        return [_encode_conversation(codec, *conversation) for conversation in conversations]
    pool = WorkerPool(num_workers, _TIMEOUT_S)
    try:
        pool.start()
        futures = [
            pool.submit(_WORKER_FUNCTION, {"folder": folder, "chunk": chunk})
            for chunk in _iter_chunks(conversations)
        ]
        return [ids for future in futures for ids in future.result()]
    except WorkerCallError as error:
        raise InputError(
            f"{key}, in a worker process",
            error,
            "prompts that can be tokenized",
            "a chat template that rejects the messages, or too little memory",
        ) from error
    finally:
        pool.close()


def encode_chunk(folder: str, chunk: Sequence[ConversationWithTools]) -> list[list[int]]:
    """Tokenize a chunk in a worker process, with the tokenizer in `folder`."""
    codec = _load_codec(folder)
    return [
        _encode_conversation(codec, [_restore_images(message) for message in messages], schemas)
        for messages, schemas in chunk
    ]


@cache
def _load_codec(folder: str) -> HFCodec:
    return HFCodec(folder)


def _encode_conversation(
    codec: ChatCodec, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
) -> list[int]:
    return codec.apply_chat_template(messages, list(schemas) or None)


def _iter_chunks(
    conversations: Sequence[ConversationWithTools],
) -> Iterator[list[ConversationWithTools]]:
    chunk: list[ConversationWithTools] = []
    num_chars = 0
    for conversation in conversations:
        messages, schemas = conversation
        messages = [_describe_images(message) for message in messages]
        size = sum(
            len(part.get("text", ""))
            for message in messages
            for part in content_parts(message["content"])
        )
        size += sum(len(json.dumps(schema)) for schema in schemas)
        if chunk and (len(chunk) == _CHUNK_ROWS or num_chars + size > _CHUNK_CHARS):
            yield chunk
            chunk, num_chars = [], 0
        chunk.append((messages, schemas))
        num_chars += size
    if chunk:
        yield chunk


def _describe_images(message: Message) -> Message:
    """Return the message with images as JSON values, as far as they decide the tokens."""
    if not isinstance(message["content"], list):
        return message
    parts = [
        {**part, "image": [part["image"].grid_thw, part["image"].merge_size]}
        if part["type"] == "image"
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _restore_images(message: Message) -> Message:
    """Return the message with images that have the number of tokens of the original ones."""
    if not isinstance(message["content"], list):
        return message
    return {**message, "content": [_restore_image(part) for part in message["content"]]}


def _restore_image(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    (frames, rows, columns), merge_size = part["image"]
    grid = (frames, rows, columns)
    image = ImageInput(image_id="", width=0, height=0, grid_thw=grid, merge_size=merge_size)
    return {**part, "image": image}
