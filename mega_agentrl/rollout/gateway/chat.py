"""Requests and answers of a chat, independent of the dialect that a client speaks.

A dialect (`openai_chat`, `openai_responses`, `anthropic`) turns the body of a request into a
`ChatRequest`, and a `ChatAnswer` into the body or the events of a response. Messages have the form
of `types.records.Message`; those of the assistant may have `tool_calls`, a list of `ToolCall`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message, ToolCall


class AnswerFinish(StrEnum):
    """Why an answer ended."""

    stop = "stop"
    """The policy ended its turn, or wrote a stop string."""
    tool_calls = "tool_calls"
    """The policy ended its turn with tool calls."""
    length = "length"
    """A limit of tokens, turns or calls was reached."""


class ErrorKind(StrEnum):
    """Kinds of errors; each dialect has its own status and name for them."""

    invalid_request = "invalid_request"
    unknown_key = "unknown_key"
    not_found = "not_found"
    too_large = "too_large"
    context_length = "context_length"
    """The conversation does not fit into `engine.max_model_len`."""
    budget_spent = "budget_spent"
    """The session has used up its tokens, turns or calls; clients must not retry."""
    overloaded = "overloaded"
    """Too many requests run at once; clients should retry later."""
    engine_failed = "engine_failed"
    """The engine died during the request; clients may retry."""

    @property
    def is_retryable(self) -> bool:
        """Whether a client may send the same request again."""
        return self in (ErrorKind.overloaded, ErrorKind.engine_failed)


class GatewayError(Exception):
    """An error that the client is told about, in its dialect."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def invalid_request(key: str, got: object, expected: str) -> GatewayError:
    """Return the error for a field of a request body."""
    shown = repr(got)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return GatewayError(ErrorKind.invalid_request, f"{key}: got {shown}, expected {expected}")


def make_call_id(answer: int, index: int) -> str:
    """Return the id of a call, from the number of its answer in the session."""
    return f"call_{answer}_{index}"


def answer_of_call(call_id: str) -> str:
    """Return what the ids of the calls of one answer have in common; empty for other ids."""
    match = re.fullmatch(r"(call_\d+)_\d+", call_id)
    return match[1] if match else ""


def index_of_call(call_id: str) -> int | None:
    """Return the number of a call in its answer; None for other ids."""
    match = re.fullmatch(r"call_\d{1,9}_(\d{1,9})", call_id)
    return int(match[1]) if match else None


@dataclass(slots=True, kw_only=True, frozen=True)
class ChatRequest:
    """A request for the next message of the assistant."""

    messages: tuple[Message, ...]
    """The conversation. Images are parts `{"type": "image", "data": bytes}`, and `{"type":
    "image", "image": ImageInput}` once the session has checked them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas, as in OpenAI's chat completions."""
    max_tokens: int | None = None
    """Maximum number of tokens to sample; None is as many as the session has left."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, which they are not part of."""
    streams: bool = False
    """Whether the answer is sent as server-sent events."""
    model: str = ""
    """Name of the model in the request, which the answer repeats."""
    options: Mapping[str, Any]
    """The body, for what only the dialect reads."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Fields of the request that have no effect, and why."""
    previous_answer_id: str = ""
    """Id of an answer of the session. `messages` then hold only what follows that answer."""
    num_instructions: int = 0
    """Number of messages at the start that requests with `previous_answer_id` do not inherit."""
    inherits_tools: bool = False
    """Whether the tools are those of the request of `previous_answer_id`."""
    prefill: str = ""
    """Beginning of the assistant's turn, which the answer continues."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (`chat_template_kwargs`)."""
    forbids_calls: bool = False
    """Whether the answer must not call a tool (`tool_choice: "none"`)."""

    @property
    def takes_calls(self) -> bool:
        """Whether the client reads calls from the answer's own field, and not from its text."""
        return bool(self.tools) and not self.forbids_calls


@dataclass(slots=True, kw_only=True, frozen=True)
class ChatAnswer:
    """The next message of the assistant."""

    answer_id: str
    """Unique within the run."""
    reasoning: str
    """Text of the chain of thought; empty without one."""
    content: str
    """Text outside of reasoning and calls."""
    tool_calls: tuple[tuple[str, ToolCall], ...]
    """Id and call, in order."""
    finish: AnswerFinish
    stop_string: str | None
    """Stop string of the request that ended the answer, if one did."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the KV cache."""
    num_answer_tokens: int
    created_s: int
    """Unix time of the answer, in seconds."""
