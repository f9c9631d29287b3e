"""OpenAI's responses, `POST /v1/responses`, with tools, images, streams and `previous_response_id`.

A turn of the assistant is several items here: reasoning, a message, calls. Those that follow each
other in this order are one turn of the conversation. A request may name an earlier response of the
same session and send only what follows it; as in OpenAI's API it does not inherit `instructions`.

Differences that a client may notice: temperature and the like are those of the run, and a warning
header says so; `tool_choice`, `text.format` and `reasoning` do not constrain the answer, because
the policy would then be trained on tokens that it did not choose. `store` is ignored: a session
knows its responses until it ends. Tools that OpenAI's servers run (web search, file search, code
interpreter, MCP), conversations, background responses and stored prompts are refused. The events of
a stream are sent when the turn is complete, because only then its text and its calls can be told
apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from mega_agentrl.rollout.gateway.chat import (
    AnswerFinish,
    ChatAnswer,
    ChatRequest,
    ErrorKind,
    GatewayError,
    answer_of_call,
    invalid_request,
)
from mega_agentrl.rollout.gateway.dialects.base import (
    Body,
    arguments_json,
    check_template_variables,
    check_token_limit,
    convert_item,
    decode_body,
    decode_data_url,
    fixed_settings,
    function_schema,
    make_call,
    order_results,
    sse_event,
    unknown_fields,
)
from mega_agentrl.rollout.gateway.dialects.openai_chat import HARMLESS_FIELDS, OPENAI_ERRORS
from mega_agentrl.types.records import Message

_ERRORS = OPENAI_ERRORS | {
    ErrorKind.not_found: (400, "invalid_request_error", "previous_response_not_found"),
}
_FIXED_SETTINGS = (
    *("temperature", "top_p", "top_logprobs", "reasoning", "text"),
    *("context_management", "max_tool_calls"),
)
"""Settings that have no effect; the run's own hold."""
_REFUSED = ("conversation", "background", "prompt", "stop")
"""Settings that the gateway does not have."""
_ROLES = {"developer": "system"}
_TURN_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""Order of the items of one turn of the assistant."""


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _MessageItem(msgspec.Struct):
    role: str
    content: str | list[_Part]


class _CallItem(msgspec.Struct):
    name: str
    arguments: str | None = None
    call_id: str = ""


class _OutputItem(msgspec.Struct):
    output: str | list[_Part]
    call_id: str | None = None
    name: str | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    context_management: list[Any] | None = None
    max_tool_calls: int | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    stop: Any = None


class OpenAIResponses:
    """The dialect of responses."""

    keep_alive = b": waiting for the policy\n\n"

    def parse_request(self, body: Body) -> ChatRequest:
        """Return the request of a body; raises `GatewayError` for another body."""
        request = decode_body(body, _Body)
        for name in _REFUSED:
            if getattr(request, name):
                raise invalid_request(name, getattr(request, name), "no such setting")
        check_token_limit(request.max_output_tokens, "max_output_tokens")
        if not request.input:
            raise invalid_request("input", request.input, "a text, or at least one item")
        instructions: list[Message] = []
        if request.instructions:
            instructions.append({"role": "system", "content": request.instructions})
        return ChatRequest(
            messages=(*instructions, *_messages(request.input)),
            tools=tuple(
                _schema(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())
            ),
            max_tokens=request.max_output_tokens,
            streams=bool(request.stream),
            model=request.model,
            options=_echoed(request),
            ignored=_ignored(request) | unknown_fields(body, _Body, HARMLESS_FIELDS),
            previous_answer_id=(request.previous_response_id or "").removeprefix("resp_"),
            num_instructions=len(instructions),
            template_variables=check_template_variables(request.chat_template_kwargs),
            forbids_calls=request.tool_choice == "none",
        )

    def render_answer(self, answer: ChatAnswer, request: ChatRequest) -> Any:
        """Return the `response` object of an answer."""
        is_cut = answer.finish is AnswerFinish.length
        return {
            **_head(answer, request),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(answer),
            "usage": _usage(answer),
        }

    def render_events(self, answer: ChatAnswer, request: ChatRequest) -> Iterator[bytes]:
        """Yield the events from `response.created` to `response.completed` or `.incomplete`."""
        numbers = count()

        def event(kind: str, **fields: Any) -> bytes:
            return sse_event({"type": kind, **fields, "sequence_number": next(numbers)}, kind)

        final = self.render_answer(answer, request)
        start = {
            **final,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        yield event("response.created", response=start)
        yield event("response.in_progress", response=start)
        for index, item in enumerate(final["output"]):
            for kind, fields in _item_events(item):
                yield event(kind, output_index=index, **fields)
        yield event(f"response.{final['status']}", response=final)

    def render_error(self, error: GatewayError) -> tuple[int, Any]:
        """Return status and `error` object."""
        status, kind, code = _ERRORS[error.kind]
        body = {"message": error.message, "type": kind, "param": None, "code": code}
        return status, {"error": body}

    def render_error_event(self, error: GatewayError) -> bytes:
        """Return the event at which the SDK raises an `APIError`."""
        body = self.render_error(error)[1]
        code, message = body["error"]["code"], body["error"]["message"]
        head = {"type": "error", "code": code, "message": message, "param": None}
        return sse_event({**head, "sequence_number": 0, **body}, "error")


def _echoed(request: _Body) -> dict[str, Any]:
    """Return the settings that a response repeats."""
    return {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "tools": request.tools or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
    }


def _ignored(request: _Body) -> dict[str, str]:
    ignored = fixed_settings(request, _FIXED_SETTINGS)
    if request.tool_choice not in (None, "auto", "none"):
        ignored["tool_choice"] = "the policy chooses"
    if request.parallel_tool_calls is False:
        ignored["parallel_tool_calls"] = "the policy chooses"
    if request.truncation not in (None, "disabled"):
        ignored["truncation"] = "a conversation is never cut"
    return ignored


def _schema(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    tool = convert_item(value, _Tool, key)
    if tool.type != "function":
        raise invalid_request(f"{key}.type", tool.type, '"function", a tool that the agent runs')
    if tool.name is None:
        raise invalid_request(f"{key}.name", None, "the name of the function")
    return function_schema(tool.name, tool.description, tool.parameters, key)


def _messages(items: str | Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Return the messages of an input; the items of one turn of the assistant are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    conversation = _Conversation()
    for index, value in enumerate(items):
        key = f"input[{index}]"
        kind = value.get("type", "message")
        if kind == "function_call_output":
            conversation.add_output(convert_item(value, _OutputItem, key), key)
        elif kind == "function_call":
            conversation.add_call(convert_item(value, _CallItem, key))
        elif kind == "reasoning":
            conversation.open_turn(kind)
        elif kind == "message" and value.get("role") == "assistant":
            content = convert_item(value, _MessageItem, key).content
            turn = conversation.open_turn(kind)
            turn["content"] = _parts(content, f"{key}.content", has_images=False)
        elif kind == "message":
            message = _input_message(convert_item(value, _MessageItem, key), key)
            conversation.messages.append(message)
        else:
            raise invalid_request(f"{key}.type", kind, "a message, or a call of a function")
    return order_results(conversation.messages)


class _Conversation:
    """Messages of an input, made item by item."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._last_kind = ""
        self._tool_names: dict[str, str] = {}
        self._turn_by_answer: dict[str, Message] = {}

    def open_turn(self, kind: str) -> Message:
        """Return the assistant's message that an item of this kind belongs to.

        A turn has at most one message, and nothing but calls after a call.
        """
        is_open = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        previous, position = _TURN_ORDER.get(self._last_kind, 0), _TURN_ORDER[kind]
        self._last_kind = kind
        if not is_open or previous > position or (kind == "message" and previous == position):
            turn = {"role": "assistant", "content": "", "tool_calls": (), "call_ids": ()}
            self.messages.append(turn)
        return self.messages[-1]

    def add_call(self, call: _CallItem) -> None:
        """Add a call. Clients may send the output of a parallel call before the next call."""
        self._tool_names[call.call_id] = call.name
        answer = answer_of_call(call.call_id)
        turn = self._turn_by_answer.get(answer)
        if turn is None:
            turn = self.open_turn("function_call")
        turn["tool_calls"] += (make_call(call.name, call.arguments),)
        turn["call_ids"] += (call.call_id,)
        if answer:
            self._turn_by_answer[answer] = turn

    def add_output(self, item: _OutputItem, key: str) -> None:
        """Add the output of a call."""
        content = _parts(item.output, f"{key}.output")
        message: Message = {"role": "tool", "content": content, "call_id": item.call_id or ""}
        name = item.name or self._tool_names.get(item.call_id or "")
        if name:
            message["name"] = name
        self.messages.append(message)


def _input_message(item: _MessageItem, key: str) -> Message:
    role = _ROLES.get(item.role, item.role)
    if role not in ("system", "user"):
        raise invalid_request(f"{key}.role", item.role, "user, system, developer or assistant")
    return {"role": role, "content": _parts(item.content, f"{key}.content")}


def _parts(
    content: str | Sequence[_Part], key: str, *, has_images: bool = True
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{key}[{index}]", has_images) for index, part in enumerate(content)]


def _part(part: _Part, key: str, has_images: bool) -> dict[str, Any]:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type in ("input_text", "output_text", "text", "refusal") and text is not None:
        return {"type": "text", "text": text}
    if part.type == "input_image" and part.image_url is not None and has_images:
        return {"type": "image", "data": decode_data_url(part.image_url, f"{key}.image_url")}
    raise invalid_request(key, part.type, "a text, or an image as a data URL")


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Return the output items of an answer; one without calls has a message in any case."""
    status = "incomplete" if answer.finish is AnswerFinish.length else "completed"
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        reasoning = {"type": "reasoning_text", "text": answer.reasoning}
        head = {"type": "reasoning", "id": f"rs_{answer.answer_id}", "summary": []}
        items.append({**head, "content": [reasoning], "status": status})
    if answer.content or not answer.tool_calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{answer.answer_id}", "role": "assistant"}
        items.append({**head, "content": [text], "status": status})
    for index, (call_id, call) in enumerate(answer.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{answer.answer_id}_{index}",
                "call_id": call_id,
                "name": call.tool,
                "arguments": arguments_json(call),
                "status": "completed",
            }
        )
    return items


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kinds and fields of the events of one output item."""
    item_id = {"item_id": item["id"]}
    is_call = item["type"] == "function_call"
    empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
    yield "response.output_item.added", {"item": {**item, **empty, "status": "in_progress"}}
    if is_call:
        arguments, name = item["arguments"], item["name"]
        yield "response.function_call_arguments.delta", {**item_id, "delta": arguments}
        done = {**item_id, "name": name, "arguments": arguments}
        yield "response.function_call_arguments.done", done
    else:
        (part,) = item["content"]
        place = {**item_id, "content_index": 0}
        more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
        kind = f"response.{part['type']}"
        yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
        yield f"{kind}.delta", {**place, "delta": part["text"], **more}
        yield f"{kind}.done", {**place, "text": part["text"], **more}
        yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"item": item}


def _head(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.answer_id}",
        "object": "response",
        "created_at": answer.created_s,
        "model": request.model,
        "error": None,
        **request.options,
    }


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": answer.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": answer.num_answer_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_answer_tokens,
    }
