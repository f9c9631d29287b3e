"""Conversations to token ids, in several processes where there are many.

A tokenizer works through some 2,000 prompts a second and holds Python's lock between the calls. A
worker needs up to 10 s to import it, so processes pay off from `MIN_ROWS` on only. The rows are
read here, once, and sent in chunks; which process takes a chunk makes no difference.

Consumes conversations, produces ids in their order. Waits for chunks, each with a deadline;
unblocked by the answer, the deadline or a worker's death, which is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from mega_agentrl.data.codec import HFCodec
from mega_agentrl.sandbox.workers import WorkerCallError, WorkerPool

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message

MIN_ROWS = 50_000
"""Prompts from which on processes are started: 25 s of one at 370 tokens each, about what two
busy cores take with the start of their workers; more cores gain."""

MAX_WORKERS = 16
"""Beyond it the one reader who feeds them is what takes long."""

_CHUNK_ROWS = 1000
_CHUNK_CHARS = 2_000_000
"""Far below what a call to a worker may hold, as JSON."""

_DEADLINE_S = 300.0
_WORKER = "mega_agentrl.data.encode:encode_chunk"

Conversation = tuple[Sequence["Message"], Sequence[str]]
"""Messages, and the names of the tools that the chat template shows."""

Schemas = Mapping[str, Mapping[str, Any]]


class ChatEncoder(Protocol):
    """Turns chat messages into prompt ids. One with a `folder` can be made again elsewhere."""

    def apply_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generate: bool = True,
    ) -> list[int]:
        """Ids of the conversation, followed by the generation prompt unless told otherwise."""


def encode_all(
    codec: ChatEncoder,
    conversations: Sequence[Conversation],
    schemas: Schemas,
    *,
    key: str,
    min_rows: int = MIN_ROWS,
) -> list[list[int]]:
    """Token ids of each conversation with its generation prompt.

    schemas: of the tools, by name. key: the setting the conversations come from, for errors.
    min_rows: as many are shared between processes. Raises ValueError where a worker fails.
    """
    num_workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    folder = getattr(codec, "folder", None)
    if len(conversations) < min_rows or num_workers < 2 or folder is None:
        return [_encode(codec, one, schemas) for one in conversations]
    pool = WorkerPool(num_workers, _DEADLINE_S)
    try:
        pool.start()
        answers = [
            pool.submit(_WORKER, {"folder": folder, "chunk": chunk, "schemas": dict(schemas)})
            for chunk in _chunks(conversations)
        ]
        return [ids for answer in answers for ids in answer.result()]
    except WorkerCallError as error:
        raise ValueError(
            f"{key}: a process that tokenizes its prompts failed: {error}; expected token ids; "
            "probable cause: a chat template that takes other messages, or too little memory"
        ) from error
    finally:
        pool.close()


def encode_chunk(folder: str, chunk: Sequence[Conversation], schemas: Schemas) -> list[list[int]]:
    """The work of a worker. folder: of the tokenizer."""
    codec = _codec(folder)
    return [_encode(codec, (messages, names), schemas) for messages, names in chunk]


@cache
def _codec(folder: str) -> HFCodec:
    return HFCodec(folder)


def _encode(codec: ChatEncoder, conversation: Conversation, schemas: Schemas) -> list[int]:
    messages, names = conversation
    return codec.apply_chat(messages, [schemas[name] for name in names] or None)


def _chunks(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    chunk: list[Conversation] = []
    num_chars = 0
    for conversation in conversations:
        size = sum(len(message["content"]) for message in conversation[0])
        if chunk and (len(chunk) == _CHUNK_ROWS or num_chars + size > _CHUNK_CHARS):
            yield chunk
            chunk, num_chars = [], 0
        chunk.append(conversation)
        num_chars += size
    if chunk:
        yield chunk
