"""The protocol of a dialect, and shared functions that decode bodies and write events."""

from __future__ import annotations

import base64
import binascii
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mega_agentrl.rollout.gateway.chat import (
    ErrorKind,
    GatewayError,
    index_of_call,
    invalid_request,
)
from mega_agentrl.tool.call_protocol.json_text import decode_nested, parse_float
from mega_agentrl.types.records import ToolCall
from mega_agentrl.vision.placeholders import content_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from mega_agentrl.rollout.gateway.chat import ChatAnswer, ChatRequest
    from mega_agentrl.types.records import Message

Body = bytes | bytearray

MAX_DEPTH = 100
"""Maximum nesting of the schema of a tool."""

MAX_UNKNOWN = 16
"""Fields of a request that are reported as unknown."""

_TEMPLATE_ARGUMENTS = (
    *("self", "conversation", "messages", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)
"""Arguments of the function that renders a chat template, which are no variables of it."""
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(float_hook=parse_float)
"""msgspec's own decoding of numbers such as 1e308 takes 20 us each, in which no thread can run."""
_JPEG_OR_PNG = "an image as a data URL, `data:image/png;base64,...`"


class Dialect(Protocol):
    """One API: how it writes requests, answers, streams and errors."""

    keep_alive: bytes
    """Event that is sent while an answer is being sampled; clients ignore it."""

    def parse_request(self, body: Body) -> ChatRequest:
        """Return the request of a body.

        Raises:
            GatewayError: the body is not a request of this API.
        """

    def render_answer(self, answer: ChatAnswer, request: ChatRequest) -> Any:
        """Return the JSON body of an answer."""

    def render_events(self, answer: ChatAnswer, request: ChatRequest) -> Iterator[bytes]:
        """Yield the server-sent events of an answer."""

    def render_error(self, error: GatewayError) -> tuple[int, Any]:
        """Return status and JSON body of an error."""

    def render_error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error after the head of a stream was sent."""


def decode_body[BodyT](body: Body, body_type: type[BodyT]) -> BodyT:
    """Return a JSON body as a `msgspec.Struct`; unknown fields are ignored.

    Raises:
        GatewayError: it is not JSON, or a field has another type; the message names the field.
    """
    try:
        # Fields of a type `float` would be decoded by msgspec, as often as they are repeated.
        return msgspec.convert(_DECODER.decode(body), body_type)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        is_split = isinstance(error, msgspec.DecodeError) and b"\\ud" in body.lower()
        cause = "; probable cause: half a surrogate pair" if is_split else ""
        raise GatewayError(ErrorKind.invalid_request, f"body: {error}{cause}") from error


def convert_item[BodyT](value: Mapping[str, Any], item_type: type[BodyT], key: str) -> BodyT:
    """Return a decoded JSON object as a `msgspec.Struct`; unknown fields are ignored.

    Raises:
        GatewayError: a field has another type.
    """
    try:
        return msgspec.convert(value, item_type)
    except msgspec.ValidationError as error:
        raise GatewayError(ErrorKind.invalid_request, f"{key}: {error}") from error


def encode_json(value: Any) -> bytes:
    """Return a value as JSON; floats are finite, and text has no lone surrogates."""
    return _ENCODER.encode(value)


def sse_event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event with a JSON value, and a name where the API has names."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode_json(value) + b"\n\n"


def fixed_settings(body: msgspec.Struct, names: Iterable[str]) -> dict[str, str]:
    """Return those of these settings that a body has, and why they have no effect."""
    return {
        name: "the run sets it"
        for name in names
        if getattr(body, name) is not None and getattr(body, name) is not False  # 0 is a setting
    }


def unknown_fields(
    body: Body, body_type: type[msgspec.Struct], harmless: Collection[str]
) -> dict[str, str]:
    """Return the fields of a valid body that the gateway does not know, at most `MAX_UNKNOWN`.

    Args:
        body: The JSON body.
        body_type: Its fields are known.
        harmless: Fields that never change an answer, such as names for bills and traces.
    """
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = {*body_type.__struct_fields__, *harmless}
    unknown = [
        name if _FIELD_NAME.fullmatch(name) else "(a name of other characters)"
        for name in names
        if name not in known
    ]
    return dict.fromkeys(unknown[:MAX_UNKNOWN], "the gateway does not know it")


def order_results(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return a conversation in which the results of parallel calls stand in the order of the calls.

    Clients send them in the order in which they became ready. The policy does not see the ids, so
    it would read them under the wrong calls. A result has its `call_id` and a turn of the assistant
    its `call_ids`, which are removed. Results of unknown calls follow the others.
    """
    ordered: list[Message] = []
    call_ids: Sequence[str] = ()
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        group_messages = [dict(message) for message in group]
        if is_result:
            keyed = [
                (_call_rank(item.pop("call_id", ""), call_ids), item) for item in group_messages
            ]
            group_messages = [item for _, item in sorted(keyed, key=lambda pair: pair[0])]
        else:
            for item in group_messages:
                call_ids = item.pop("call_ids", ())
        ordered += group_messages
    return tuple(ordered)


def _call_rank(call_id: str, call_ids: Sequence[str]) -> tuple[int, int]:
    if call_id in call_ids:
        return 0, call_ids.index(call_id)
    index = index_of_call(call_id)  # of a turn that the client does not repeat
    return (1, 0) if index is None else (0, index)


def take_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Return a conversation without the beginning of the answer at its end, and this beginning.

    Raises:
        GatewayError: it has calls.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return messages, ""
    if messages[-1].get("tool_calls"):
        expected = "a text; the results of calls must follow them"
        raise invalid_request(f"messages[{len(messages) - 1}]", "calls at the end", expected)
    return messages[:-1], content_text(messages[-1]["content"])


def check_template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of the chat template in `chat_template_kwargs`, empty without any.

    Raises:
        GatewayError: one of them is no variable, but an argument or a token of the tokenizer.
    """
    key = "chat_template_kwargs"
    _check_depth(variables, key)
    for name in variables or {}:
        is_variable = _FIELD_NAME.fullmatch(name) and name not in _TEMPLATE_ARGUMENTS
        if not is_variable or name.endswith("_token"):
            raise invalid_request(key, name, "names of variables of the model's chat template")
    return dict(variables or {})


def check_token_limit(limit: int | None, key: str) -> None:
    """Check the maximum number of tokens of an answer.

    Raises:
        GatewayError: it is below 1.
    """
    if limit is not None and limit < 1:
        raise invalid_request(key, limit, "at least 1")


def function_schema(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, key: str
) -> dict[str, Any]:
    """Return the schema of a function in the form that the chat template gets.

    Raises:
        GatewayError: the parameters are nested too deeply for a chat template.
    """
    _check_depth(parameters, key)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _check_depth(value: Any, key: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = [item for items in children for item in items]
    if level:
        raise invalid_request(key, "a deeper value", f"at most {MAX_DEPTH} levels of nesting")


def decode_data_url(url: str, key: str) -> bytes:
    """Return the bytes of a data URL; addresses of the network are refused.

    Raises:
        GatewayError: it is another kind of URL, or not base64.
    """
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise invalid_request(key, url[:80], _JPEG_OR_PNG)
    return decode_base64(data, key)


def decode_base64(data: str, key: str) -> bytes:
    """Return the bytes of a base64 text.

    Raises:
        GatewayError: it is not base64.
    """
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_request(key, data[:80], "base64") from error


def make_call(name: str, arguments: str | Mapping[str, Any] | None) -> ToolCall:
    """Return a call in a history, whose arguments may be JSON text or missing.

    They are read as the policy's own are, so that a client may write none as `{}`, null or an empty
    text. Text that is not a JSON object, which the policy may have written, is kept as `_text`.
    """
    try:
        value = decode_nested(arguments)
    except ValueError:
        value = arguments
    value = {} if value is None else value
    return ToolCall(tool=name, arguments=value if isinstance(value, dict) else {"_text": arguments})


def arguments_json(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return encode_json(call.arguments).decode()
