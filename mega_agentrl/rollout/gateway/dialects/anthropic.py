"""Anthropic's messages, `POST /v1/messages` and `/v1/messages/count_tokens`.

Differences that a client may notice: temperature and the like are those of the run, and a warning
header says so; `thinking`, `tool_choice` and `output_config` do not constrain the answer, because
the policy would then be trained on tokens that it did not choose. `cache_control` has no meaning
here and is ignored. A message of the assistant at the end, which the API calls a prefill, is
the beginning of the answer; it is not trained. Tools and content blocks
that Anthropic's servers run or read (web search, documents, files) are refused. Those that the
client runs and the model knows by their type get a schema (`anthropic_tools`). The events of a
stream are sent when the turn is complete, because only then its text and its calls can be told
apart.

A request may name an earlier answer of the session and send only what follows it: the field
`thread`, which the SDK's tool runner uses. It inherits `system` and `tools`.
"""

from __future__ import annotations

import re
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
from mega_agentrl.rollout.gateway.dialects.anthropic_tools import CLIENT_TOOLS
from mega_agentrl.rollout.gateway.dialects.base import (
    Body,
    check_template_variables,
    check_token_limit,
    decode_base64,
    decode_body,
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

_STATUSES = {
    ErrorKind.invalid_request: (400, "invalid_request_error"),
    ErrorKind.unknown_key: (401, "authentication_error"),
    ErrorKind.not_found: (404, "not_found_error"),
    ErrorKind.too_large: (413, "request_too_large"),
    ErrorKind.context_length: (400, "invalid_request_error"),
    ErrorKind.budget_spent: (400, "invalid_request_error"),
    ErrorKind.overloaded: (529, "overloaded_error"),
    ErrorKind.engine_failed: (500, "api_error"),
}
_FIXED_SETTINGS = (
    *("temperature", "top_p", "top_k", "thinking"),
    *("output_config", "output_format", "context_management"),
)
"""Settings that have no effect; the run's own hold."""
_HARMLESS_FIELDS = ("metadata", "cache_control", "service_tier", "inference_geo", "betas")
"""Fields that never change an answer."""
_REFUSED = ("mcp_servers", "container")
"""Settings that ask Anthropic's servers to run something."""
_SIGNATURE = "bWVnYV9hZ2VudHJs"
"""Signature of all thinking, which clients send back and nobody reads."""

_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
"""Line of the system prompt in which Claude Code numbers its requests."""


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Source(msgspec.Struct):
    type: str
    data: str = ""


class _Image(msgspec.Struct, tag_field="type", tag="image"):
    source: _Source


class _Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    pass


class _RedactedThinking(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    pass


class _ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] | None = None


class _ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text | _Image] | None = None
    is_error: bool | None = None


_Block = _Text | _Image | _Thinking | _RedactedThinking | _ToolUse | _ToolResult


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    disable_parallel_tool_use: bool | None = None


class _Thread(msgspec.Struct):
    type: Literal["create", "continue"]
    previous_message_id: str = ""


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thread: _Thread | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


class AnthropicMessages:
    """The dialect of Anthropic's messages."""

    keep_alive = sse_event({"type": "ping"}, "ping")

    def parse_request(self, body: Body) -> ChatRequest:
        """Return the request of a body; raises `GatewayError` for another body."""
        request = decode_body(body, _Body)
        if request.max_tokens is None:
            raise invalid_request("max_tokens", None, "a number of tokens")
        check_token_limit(request.max_tokens, "max_tokens")
        return _chat_request(request, _ignored(request, body))

    def parse_count_request(self, body: Body) -> ChatRequest:
        """Return the conversation whose tokens are to be counted."""
        request = decode_body(body, _Body)
        return _chat_request(request, _ignored(request, body))

    def render_answer(self, answer: ChatAnswer, request: ChatRequest) -> Any:
        """Return the `message` object of an answer."""
        return {
            **_head(answer, request),
            "content": _content(answer),
            **_stop(answer),
            "usage": _usage(answer),
        }

    def render_events(self, answer: ChatAnswer, request: ChatRequest) -> Iterator[bytes]:
        """Yield the events from `message_start` to `message_stop`."""
        usage = _usage(answer)
        start = {
            **_head(answer, request),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0},
        }
        yield _event("message_start", message=start)
        for index, block in enumerate(_content(answer)):
            yield from _block_events(index, block)
        yield _event("message_delta", delta=_stop(answer), usage=usage)
        yield _event("message_stop")

    def render_error(self, error: GatewayError) -> tuple[int, Any]:
        """Return status and `error` object."""
        status, kind = _STATUSES[error.kind]
        message = error.message
        if error.kind is ErrorKind.context_length:  # clients look for these words
            message = f"prompt is too long: {message}"
        content: dict[str, Any] = {"type": kind, "message": message}
        if error.kind is ErrorKind.not_found:  # the SDK then sends the whole conversation
            content["details"] = {"error_code": "thread_not_found"}
        return status, {"type": "error", "error": content}

    def render_error_event(self, error: GatewayError) -> bytes:
        """Return the event at which the SDK raises an `APIStatusError`."""
        return sse_event(self.render_error(error)[1], "error")


def _chat_request(body: _Body, ignored: Mapping[str, str]) -> ChatRequest:
    for name in _REFUSED:
        if getattr(body, name):
            raise invalid_request(name, getattr(body, name), "no such setting")
    if not body.messages:
        raise invalid_request("messages", [], "at least one message")
    system: list[Message] = []
    texts = [_Text(body.system)] if isinstance(body.system, str) else body.system or []
    if texts := _without_billing_lines(texts):
        system.append({"role": "system", "content": _parts(texts, "system")})
    previous_id = ""
    if body.thread is not None and body.thread.type == "continue":
        previous_id = body.thread.previous_message_id.removeprefix("msg_")
        if not previous_id or system or body.tools:
            raise invalid_request(
                "thread",
                body.thread.previous_message_id,
                "the id of a message, and neither system nor tools, which a thread keeps",
            )
    messages, prefill = take_prefill(order_results(_messages(body.messages)))
    return ChatRequest(
        messages=(*system, *messages),
        prefill=prefill,
        tools=tuple(
            _schema(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())
        ),
        max_tokens=body.max_tokens,
        stop=tuple(text for text in body.stop_sequences or () if text),
        streams=bool(body.stream),
        model=body.model,
        options={},
        ignored=ignored,
        previous_answer_id=previous_id,
        inherits_tools=bool(previous_id),
        template_variables=check_template_variables(body.chat_template_kwargs),
        forbids_calls=body.tool_choice is not None and body.tool_choice.type == "none",
    )


def _without_billing_lines(blocks: Sequence[_Text]) -> list[_Text]:
    """Return the blocks of a system prompt without lines that differ from request to request."""
    texts = [(block.text, _BILLING_LINE.sub("", block.text)) for block in blocks]
    return [_Text(rest) for text, rest in texts if rest.strip() or not text.strip()]


def _ignored(body: _Body, source: Body) -> dict[str, str]:
    ignored = fixed_settings(body, _FIXED_SETTINGS)
    choice = body.tool_choice
    is_usual = choice is None or choice.type in ("auto", "none")
    if not is_usual or (choice and choice.disable_parallel_tool_use):
        ignored["tool_choice"] = "the policy chooses"
    return ignored | unknown_fields(source, _Body, _HARMLESS_FIELDS)


def _schema(tool: _Tool, key: str) -> dict[str, Any]:
    kind = (tool.type or "custom").rpartition("_")[0] or "custom"  # without the date
    if kind in CLIENT_TOOLS:
        description, input_schema = CLIENT_TOOLS[kind]
        return function_schema(tool.name, tool.description or description, input_schema, key)
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise invalid_request(key, tool.type, "a tool with an input_schema, which the agent runs")
    return function_schema(tool.name, tool.description, tool.input_schema, key)


def _messages(messages: Sequence[_Message]) -> list[Message]:
    """Return messages in the gateway's form; the assistant's next to each other are one."""
    result: list[Message] = []
    tool_names: dict[str, str] = {}
    for index, message in enumerate(messages):
        key = f"messages[{index}].content"
        content = message.content
        blocks: list[_Block] = [_Text(content)] if isinstance(content, str) else content
        if message.role == "assistant":
            tool_names |= {block.id: block.name for block in blocks if isinstance(block, _ToolUse)}
            answer = _assistant_message(blocks, key)
            if result and result[-1]["role"] == "assistant":
                result[-1]["content"] += answer["content"]
                result[-1]["tool_calls"] += answer["tool_calls"]
                result[-1]["call_ids"] += answer["call_ids"]
            else:
                result.append(answer)
        else:
            result += _input_messages(message.role, blocks, key, tool_names)
    return result


def _assistant_message(blocks: Sequence[_Block], key: str) -> Message:
    texts: list[dict[str, Any]] = []
    calls, call_ids = [], []
    for index, block in enumerate(blocks):
        match block:
            case _Text():
                texts.append({"type": "text", "text": block.text})
            case _ToolUse():
                calls.append(make_call(block.name, block.input))
                call_ids.append(block.id)
            case _Image() | _ToolResult():
                raise invalid_request(f"{key}[{index}]", "an input", "a block of the assistant")
    return {
        "role": "assistant",
        "content": texts,
        "tool_calls": tuple(calls),
        "call_ids": tuple(call_ids),
    }


def _input_messages(
    role: str, blocks: Sequence[_Block], key: str, tool_names: Mapping[str, str]
) -> list[Message]:
    """Return one message for each tool result, and one for the other blocks if there are any."""
    results: list[Message] = []
    others: list[_Text | _Image] = []
    for index, block in enumerate(blocks):
        match block:
            case _ToolResult() if role == "user":
                content = _parts(block.content or "", f"{key}[{index}].content")
                result: Message = {"role": "tool", "content": content, "call_id": block.tool_use_id}
                if block.tool_use_id in tool_names:
                    result["name"] = tool_names[block.tool_use_id]
                if block.is_error:
                    result["is_error"] = True
                results.append(result)
            case _Text() | _Image():
                others.append(block)
            case _:
                raise invalid_request(f"{key}[{index}]", type(block).__name__, f"input of {role}")
    if others or not results:
        results.append({"role": role, "content": _parts(others, key)})
    return results


def _parts(content: str | Sequence[_Text | _Image], key: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, _Text)
        else {"type": "image", "data": _image_data(block.source, f"{key}[{index}].source")}
        for index, block in enumerate(content)
    ]


def _image_data(source: _Source, key: str) -> bytes:
    if source.type != "base64":
        raise invalid_request(f"{key}.type", source.type, '"base64"; the run fetches no addresses')
    return decode_base64(source.data, f"{key}.data")


def _content(answer: ChatAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        thinking = {"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE}
        blocks.append(thinking)
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call_id, call in answer.tool_calls:
        blocks.append(
            {"type": "tool_use", "id": call_id, "name": call.tool, "input": call.arguments}
        )
    return blocks


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield start, deltas and stop of one block."""
    empty: dict[str, Any]
    match block["type"]:
        case "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "text":
            empty = {"text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        case _:
            empty = {"input": {}}
            text = encode_json(block["input"]).decode()
            deltas = [{"type": "input_json_delta", "partial_json": text}]
    yield _event("content_block_start", index=index, content_block={**block, **empty})
    for delta in deltas:
        yield _event("content_block_delta", index=index, delta=delta)
    yield _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event({"type": kind, **fields}, kind)


def _head(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }


def _stop(answer: ChatAnswer) -> dict[str, Any]:
    match answer.finish:
        case AnswerFinish.length:
            reason = "max_tokens"
        case AnswerFinish.tool_calls:
            reason = "tool_use"
        case AnswerFinish.stop:
            reason = "end_turn" if answer.stop_string is None else "stop_sequence"
    sequence = answer.stop_string if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "output_tokens": answer.num_answer_tokens,
    }
