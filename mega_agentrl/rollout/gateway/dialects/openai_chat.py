"""OpenAI's chat completions, `POST /v1/chat/completions`, with tools, images and streams.

Differences that a client may notice: temperature, top_p and the like are those of the run, and a
warning header says so; `n` is 1; log-probs are not returned; `tool_choice` and `response_format`
do not constrain the answer, because the policy would then be trained on tokens that it did not
choose. With `continue_final_message`, or `prefix` in the last message, a last message of the
assistant is the beginning of the answer; it is not trained. Reasoning is in `reasoning_content` of
the message. The events of a stream are sent when the turn is complete, because only then its text
and its calls can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    Body,
    arguments_json,
    check_template_variables,
    check_token_limit,
    decode_body,
    decode_data_url,
    encode_json,
    fixed_settings,
    function_schema,
    make_call,
    order_results,
    sse_event,
    take_prefill,
    unknown_fields,
)
from mega_agentrl.types.records import Message

OPENAI_ERRORS: dict[ErrorKind, tuple[int, str, str | None]] = {
    ErrorKind.invalid_request: (400, "invalid_request_error", None),
    ErrorKind.unknown_key: (401, "invalid_request_error", "invalid_api_key"),
    ErrorKind.not_found: (404, "invalid_request_error", "not_found"),
    ErrorKind.too_large: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.context_length: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.budget_spent: (400, "invalid_request_error", "budget_spent"),
    ErrorKind.overloaded: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.engine_failed: (503, "server_error", "engine_failed"),
}
"""Status, type and code of each kind of error in OpenAI's APIs."""
_FIXED_SETTINGS = (
    *("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"),
    *("logit_bias", "logprobs", "response_format", "reasoning_effort", "verbosity", "prediction"),
)
"""Settings that have no effect; the run's own hold."""
HARMLESS_FIELDS = (
    *("store", "user", "metadata", "service_tier", "safety_identifier", "include"),
    *("prompt_cache_key", "prompt_cache_retention", "stream_options", "add_generation_prompt"),
)
"""Fields of OpenAI's APIs that never change an answer."""
_ROLES = {"developer": "system", "function": "tool"}
_REFUSED = {
    "functions": "tools",
    "function_call": "tool_choice",
    "audio": "text",
    "web_search_options": "a function in tools",
}
"""Settings that are refused, and what to use."""


class _FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _FunctionCall
    id: str = ""


class _ImageUrl(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | _ImageUrl | None = None


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    name: str | None = None
    prefix: bool | None = None


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None
    type: str = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_ChatMessage]
    model: str = ""
    tools: list[_Tool] | None = None
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
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


class OpenAIChat:
    """The dialect of chat completions."""

    keep_alive = b": waiting for the policy\n\n"

    def parse_request(self, body: Body) -> ChatRequest:
        """Return the request of a body; raises `GatewayError` for another body."""
        request = decode_body(body, _Body)
        if request.n not in (None, 1):
            raise invalid_request("n", request.n, "1, since an attempt has one continuation")
        for name, use in _REFUSED.items():
            if getattr(request, name) is not None:
                raise invalid_request(name, getattr(request, name), f"no such field; use {use}")
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        check_token_limit(limit, "max_tokens")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if not request.messages:
            raise invalid_request("messages", [], "at least one message")
        messages: Sequence[Message] = _messages(request.messages)
        prefill = ""
        if request.continue_final_message or request.messages[-1].prefix:
            messages, prefill = take_prefill(messages)
        return ChatRequest(
            messages=tuple(messages),
            prefill=prefill,
            tools=tuple(
                _schema(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())
            ),
            max_tokens=limit,
            stop=tuple(text for text in stop if text),
            streams=bool(request.stream),
            model=request.model,
            options={
                "include_usage": bool(
                    request.stream_options and request.stream_options.include_usage
                )
            },
            ignored=_ignored(request) | unknown_fields(body, _Body, HARMLESS_FIELDS),
            template_variables=check_template_variables(request.chat_template_kwargs),
            forbids_calls=request.tool_choice == "none",
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
        status, kind, code = OPENAI_ERRORS[error.kind]
        body = {"message": error.message, "type": kind, "param": None, "code": code}
        return status, {"error": body}

    def render_error_event(self, error: GatewayError) -> bytes:
        """Return the event at which the SDK raises an `APIError`."""
        return b"data: " + encode_json(self.render_error(error)[1]) + b"\n\n"


def _ignored(request: _Body) -> dict[str, str]:
    ignored = fixed_settings(request, _FIXED_SETTINGS)
    if request.tool_choice not in (None, "auto", "none"):
        ignored["tool_choice"] = "the policy chooses"
    if request.parallel_tool_calls is False:
        ignored["parallel_tool_calls"] = "the policy chooses"
    return ignored


def _schema(tool: _Tool, key: str) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function" or function is None:
        raise invalid_request(key, tool.type, 'a tool of type "function"')
    return function_schema(function.name, function.description, function.parameters, key)


def _messages(messages: Sequence[_ChatMessage]) -> tuple[Message, ...]:
    tool_names = {
        call.id: call.function.name for message in messages for call in message.tool_calls or ()
    }
    return order_results(
        _message(message, f"messages[{index}]", tool_names)
        for index, message in enumerate(messages)
    )


def _message(message: _ChatMessage, key: str, tool_names: Mapping[str, str]) -> Message:
    if message.function_call is not None:
        raise invalid_request(f"{key}.function_call", message.function_call, "tool_calls")
    content = message.content
    if content is None:
        content = message.refusal or ""
    parts = (
        content
        if isinstance(content, str)
        else [
            _part(part, f"{key}.content[{index}]", message.role)
            for index, part in enumerate(content)
        ]
    )
    result: Message = {"role": _ROLES.get(message.role, message.role), "content": parts}
    if message.role == "assistant" and message.tool_calls:
        result["tool_calls"] = tuple(
            make_call(call.function.name, call.function.arguments) for call in message.tool_calls
        )
        result["call_ids"] = [call.id for call in message.tool_calls]
    if result["role"] == "tool":
        result["call_id"] = message.tool_call_id or ""
        name = message.name or tool_names.get(result["call_id"])
        if name:
            result["name"] = name
    return result


def _part(part: _Part, key: str, role: str) -> dict[str, Any]:
    """Return a part of a message's content, a text or an image."""
    text = part.text if part.type == "text" else part.refusal
    if part.type in ("text", "refusal") and text is not None:
        return {"type": "text", "text": text}
    image = part.image_url
    url = image.url if isinstance(image, _ImageUrl) else image
    if part.type == "image_url" and url is not None and role != "assistant":
        return {"type": "image", "data": decode_data_url(url, f"{key}.image_url")}
    raise invalid_request(key, part.type, 'a part of type "text" or "image_url"')


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
