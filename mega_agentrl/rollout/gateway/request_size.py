"""Sizes of requests, which are checked before anything that takes longer for larger ones."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError, invalid_request
from mega_agentrl.types.records import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.rollout.gateway.chat import ChatRequest

MAX_CHARS_PER_TOKEN = 16
"""Characters of a conversation for each token of `engine.max_model_len`. Text has about 4 a
token, code and tables up to 8: a longer conversation does not fit, unless it is all white space."""

MAX_VALUES_PER_TOKEN = 16
"""Values of a JSON body for each token of `engine.max_model_len`. A value takes one token at least
where it is shown, and about 100 bytes of memory."""

MAX_COLONS_PER_TOKEN = 1
"""Colons of a JSON body for each token of `engine.max_model_len`; each key has one. Decoding a key
takes up to 0.4 us, in which no thread can run. In a conversation a key takes more than one token,
and text has far fewer colons."""

MIN_COUNT = 1 << 16
"""The bounds of colons and digits are not lower than this: so many keys take about 20 ms."""

MIN_TOKENS = 4096
"""The two bounds are not lower for a model with a shorter context, which may be sent many tools."""

MAX_IMAGES = 500
"""Images of a request, as in OpenAI's API; Anthropic's allows 100."""

MAX_STOP_STRINGS = 16
"""Stop strings of a request. OpenAI's API allows 4; the engine compares each of them with the
output at every token."""

MAX_STOP_CHARS = 256
"""Characters of a stop string."""

MAX_ARGUMENT_BYTES = 1 << 20
"""Size of the arguments of a call of the run's own tools. The calls that the policy samples are far
shorter."""

MAX_ESCAPES_PER_TOKEN = 2 * MAX_CHARS_PER_TOKEN
"""Backslashes of a JSON body for each token: a character has at most two, as a surrogate pair."""

MAX_LONG_DIGITS_PER_TOKEN = 4
"""Digits in numbers of `_LONG_DIGITS` and more, for each token; a token has up to three digits.
Decoding takes time that grows with the square of such a number."""

_LONG_DIGITS = 100
_DIGITS_AS_ONES = bytes(49 if 48 <= byte <= 57 else 32 for byte in range(256))


def check_decoding_work(body: bytes | bytearray, max_model_len: int) -> None:
    """Check what the decoding of a JSON body costs, before it is decoded.

    No thread can run while it is. What stands within texts counts as well.

    Raises:
        GatewayError: there is more than any conversation has that fits into the context.
    """
    num_tokens = max(max_model_len, MIN_TOKENS)
    checks: dict[str, tuple[Callable[[bytes | bytearray], int], int]] = {
        "colons": (partial(_count, b":"), max(MAX_COLONS_PER_TOKEN * num_tokens, MIN_COUNT)),
        "digits of long numbers": (
            _count_long_digits,
            max(MAX_LONG_DIGITS_PER_TOKEN * num_tokens, MIN_COUNT),
        ),
        "commas and brackets": (partial(_count, b",[{"), MAX_VALUES_PER_TOKEN * num_tokens),
        "backslashes": (partial(_count, b"\\"), MAX_ESCAPES_PER_TOKEN * num_tokens),
    }
    for what, (count, limit) in checks.items():
        if len(body) > limit and (got := count(body)) > limit:
            raise GatewayError(
                ErrorKind.context_length,
                f"body: got {got} {what}, expected at most {limit}, more than fit into the context "
                f"length of the model, {max_model_len} tokens",
            )


def _count(characters: bytes, body: bytes | bytearray) -> int:
    return sum(body.count(character) for character in characters)


def _count_long_digits(body: bytes | bytearray) -> int:
    return _LONG_DIGITS * body.translate(_DIGITS_AS_ONES).count(b"1" * _LONG_DIGITS)


def decoding_work(num_bytes: int, num_objects: int) -> int:
    """Return the number of characters whose encoding takes as long as decoding and hashing a body.

    Args:
        num_bytes: Size of the body.
        num_objects: Number of its JSON objects; each message is one.
    """
    return num_bytes // 16 + 16 * num_objects


def check_request_size(request: ChatRequest, num_bytes: int, max_model_len: int) -> None:
    """Check the size of a request.

    Args:
        request: The request.
        num_bytes: Size of its body, which has at most as many characters. They are counted only if
            it is large.
        max_model_len: Context length of the model.

    Raises:
        GatewayError: it is too long for the context, or has too many images or stop strings.
    """
    if len(request.stop) > MAX_STOP_STRINGS:
        raise invalid_request("stop", len(request.stop), f"at most {MAX_STOP_STRINGS} strings")
    longest = max(map(len, request.stop), default=0)
    if longest > MAX_STOP_CHARS:
        raise invalid_request(
            "stop", f"{longest} characters", f"at most {MAX_STOP_CHARS} in each string"
        )
    num_messages = len(request.messages)
    if num_messages > max(max_model_len, MIN_TOKENS):
        raise _too_long(f"{num_messages} messages", "one", max_model_len)
    contents = (message["content"] for message in request.messages)
    num_parts = sum(len(content) for content in contents if not isinstance(content, str))
    if num_parts > MAX_IMAGES:
        num_images = sum(isinstance(item, bytes) for item in _leaves(request.messages))
        if num_images > MAX_IMAGES:
            raise invalid_request("messages", f"{num_images} images", f"at most {MAX_IMAGES}")
    limit = MAX_CHARS_PER_TOKEN * max(max_model_len, MIN_TOKENS)
    if num_bytes > limit:
        shown = (request.messages, request.tools, request.template_variables, request.prefill)
        length = num_chars(shown)
        if length > limit:
            raise _too_long(f"{length} characters", f"{MAX_CHARS_PER_TOKEN}", max_model_len)


def num_chars(value: Any) -> int:
    """Return the number of characters of the texts and keys within messages or schemas."""
    return sum(len(item) for item in _leaves(value) if type(item) is str)


def stored_bytes(value: Any) -> int:
    """Return about how much memory messages or schemas take, without the bytes of their images."""
    return sum(map(sys.getsizeof, _leaves(value, with_containers=True)))


def _leaves(value: Any, *, with_containers: bool = False) -> list[Any]:
    """Return the values and keys within a value, and lists and objects if asked for."""
    leaves: list[Any] = []
    stack = [value]
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind is str:  # nearly all of them
            leaves.append(item)
            continue
        is_container = True
        if kind is dict:
            stack += item
            stack += item.values()
        elif kind is tuple or kind is list:
            stack += item
        elif kind is ToolCall:
            stack += (item.tool, item.arguments)
        else:
            is_container = False
        if with_containers or not is_container:
            leaves.append(item)
    return leaves


def _too_long(got: str, expected: str, max_model_len: int) -> GatewayError:
    return GatewayError(
        ErrorKind.context_length,
        f"messages: got {got}, expected at most {expected} for each of the {max_model_len} tokens "
        "of the model's context length",
    )
