"""OpenAI's chat completions, `POST /v1/chat/completions`, with tools, images and streams.

Differences that a client may notice: temperature, top_p and the like are those of the run, and a
warning header says so; `n` is 1; log-probs are not returned; `tool_choice` and `response_format`
do not constrain the answer, because the policy would then be trained on tokens that it did not
choose. Reasoning is in `reasoning_content` of the message. The events of a stream are sent when the
turn is complete, because only then its text and its calls can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from mega_agentrl.rollout.gateway.chat import (
    AnswerFinish,
    ChatAnswer,
    ChatRequest,
    ErrorKind,
    GatewayError,
    invalid_request,
)
from mega_agentrl.rollout.gateway.dialects.base import (
    arguments_json,
    decode_body,
    decode_data_url,
    encode_json,
    make_call,
    sse_event,
)
from mega_agentrl.types.records import Message

_STATUSES = {
    ErrorKind.invalid_request: (400, "invalid_request_error", None),
    ErrorKind.unknown_key: (401, "invalid_request_error", "invalid_api_key"),
    ErrorKind.not_found: (404, "invalid_request_error", "not_found"),
    ErrorKind.too_large: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.context_length: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.budget_spent: (400, "invalid_request_error", "budget_spent"),
    ErrorKind.overloaded: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.engine_failed: (503, "server_error", "engine_failed"),
}
_FIXED_SETTINGS = (
    *("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"),
    *("logit_bias", "logprobs", "response_format", "reasoning_effort"),
)
"""Settings that have no effect; the run's own hold."""


class _FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _ToolCall(msgspec.Struct):
    function: _FunctionCall
    id: str = ""


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_ChatMessage]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class OpenAIChat:
    """The dialect of chat completions."""

    keep_alive = b": waiting for the policy\n\n"

    def parse_request(self, body: bytes) -> ChatRequest:
        """Return the request of a body; raises `GatewayError` for another body."""
        request = decode_body(body, _Body)
        if request.n not in (None, 1):
            raise invalid_request("n", request.n, "1, since an attempt has one continuation")
        limit = request.max_completion_tokens or request.max_tokens
        if limit is not None and limit < 1:
            raise invalid_request("max_tokens", limit, "at least 1")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        warnings = [
            f"{name} has no effect: the run sets it"
            for name in _FIXED_SETTINGS
            if getattr(request, name) not in (None, False)
        ]
        if request.tool_choice not in (None, "auto"):
            warnings.append("tool_choice has no effect: the policy chooses")
        messages = [
            _message(message, f"messages[{index}]")
            for index, message in enumerate(request.messages)
        ]
        if not messages:
            raise invalid_request("messages", [], "at least one message")
        return ChatRequest(
            messages=tuple(messages),
            tools=tuple(request.tools or ()),
            max_tokens=limit,
            stop=tuple(text for text in stop if text),
            streams=bool(request.stream),
            model=request.model,
            options={
                "include_usage": bool(
                    request.stream_options and request.stream_options.include_usage
                )
            },
            warnings=tuple(warnings),
        )

    def render_answer(self, answer: ChatAnswer, request: ChatRequest) -> Any:
        """Return the `chat.completion` object of an answer."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = _rendered_calls(answer)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": str(answer.finish),
        }
        head = _head(answer, request, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(answer)}

    def render_events(self, answer: ChatAnswer, request: ChatRequest) -> Iterator[bytes]:
        """Yield `chat.completion.chunk` events, and `[DONE]` at the end."""
        head = _head(answer, request, "chat.completion.chunk")

        def chunk(delta: Mapping[str, Any], finish: AnswerFinish | None = None) -> bytes:
            reason = None if finish is None else str(finish)
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return sse_event({**head, "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        if answer.reasoning:
            yield chunk({"reasoning_content": answer.reasoning})
        if answer.content:
            yield chunk({"content": answer.content})
        for index, call in enumerate(_rendered_calls(answer)):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, answer.finish)
        if request.options["include_usage"]:
            yield sse_event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def render_error(self, error: GatewayError) -> tuple[int, Any]:
        """Return status and `error` object."""
        status, kind, code = _STATUSES[error.kind]
        body = {"message": error.message, "type": kind, "param": None, "code": code}
        return status, {"error": body}

    def render_error_event(self, error: GatewayError) -> bytes:
        """Return the event at which the SDK raises an `APIError`."""
        return b"data: " + encode_json(self.render_error(error)[1]) + b"\n\n"


def _message(message: _ChatMessage, key: str) -> Message:
    content = message.content
    parts = (
        content
        if content is None or isinstance(content, str)
        else [
            _part(part, f"{key}.content[{index}]", message.role)
            for index, part in enumerate(content)
        ]
    )
    result: Message = {"role": message.role, "content": parts or ""}
    if message.role in ("developer", "function"):
        result["role"] = "system" if message.role == "developer" else "tool"
    if message.role == "assistant" and message.tool_calls:
        result["tool_calls"] = tuple(
            make_call(call.function.name, call.function.arguments) for call in message.tool_calls
        )
    if message.name and message.role in ("tool", "function"):
        result["name"] = message.name
    return result


def _part(part: Mapping[str, Any], key: str, role: str) -> dict[str, Any]:
    """Return a part of a message's content, a text or an image."""
    kind = part.get("type")
    text = part.get("text" if kind == "text" else "refusal")
    if kind in ("text", "refusal") and isinstance(text, str):
        return {"type": "text", "text": text}
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if kind == "image_url" and isinstance(url, str) and role != "assistant":
        return {"type": "image", "data": decode_data_url(url, f"{key}.image_url")}
    raise invalid_request(key, dict(part), 'a part of type "text" or "image_url"')


def _rendered_calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.tool, "arguments": arguments_json(call)},
        }
        for call_id, call in answer.tool_calls
    ]


def _head(answer: ChatAnswer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.answer_id}",
        "object": kind,
        "created": answer.created_s,
        "model": request.model,
    }


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_answer_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }
