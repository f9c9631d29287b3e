"""The fields of all messages inside a sandbox and between it and the host.

A `MessageTable` lists what one side of a channel may send. `Channel` checks each received message
against its table before anyone reads a field, because the sender may be the policy's code. A
message with an unknown kind, a missing or unexpected field, or a value of another type or outside
of its bounds raises `ValueError`, and the reader ends the sender: its interpreter, its session or,
if the host reads it, the connection.

To add a message or a field, add its row here; the reader needs no checks of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TEXT_CHARS = 1 << 26
_MAX_SHOWN_CHARS = 60
_MAX_ID = 2**53
_MAX_TIMEOUT_S = 1e12


@dataclass(frozen=True)
class Integer:
    """An integer from `low` to `high`, but not true or false."""

    low: int
    high: int

    def accepts(self, value: object) -> bool:
        """Return whether `value` is valid."""
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`."""

    low: float
    high: float

    def accepts(self, value: object) -> bool:
        """Return whether `value` is valid."""
        return type(value) in (int, float) and self.low <= value <= self.high  # type: ignore[operator]


@dataclass(frozen=True)
class Text:
    """Text of at most `max_chars`; with `encodable`, without lone surrogates."""

    max_chars: int
    encodable: bool = True

    def accepts(self, value: object) -> bool:
        """Return whether `value` is valid."""
        if not isinstance(value, str) or len(value) > self.max_chars:
            return False
        if self.encodable:
            try:
                value.encode()
            except UnicodeEncodeError:
                return False
        return True


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def accepts(self, value: object) -> bool:
        """Return whether `value` is valid."""
        return isinstance(value, bool)


@dataclass(frozen=True)
class Choice:
    """One of several texts."""

    values: tuple[str, ...]

    def accepts(self, value: object) -> bool:
        """Return whether `value` is valid."""
        return isinstance(value, str) and value in self.values


class FrameError(ValueError):
    """A frame, its descriptors or its sender are not what a channel accepts.

    Attributes:
        got: What has arrived.
        expected: What may arrive.
    """

    def __init__(self, got: str, expected: str) -> None:
        super().__init__(f"got {got}, expected {expected}")
        self.got = got
        self.expected = expected


FieldType = Integer | Number | Text | Flag | Choice


@dataclass(frozen=True)
class MessageTable:
    """The messages that one side of a channel may send."""

    key: str
    """Name of the field that holds the kind."""
    kinds: Mapping[str, Mapping[str, FieldType]]
    """The other fields of each kind."""

    def check(self, message: dict[str, Any]) -> None:
        """Raise `FrameError` unless `message` is one of the table's messages."""
        kind = message.get(self.key)
        fields = self.kinds.get(kind) if isinstance(kind, str) else None
        if fields is None:
            kinds = ", ".join(self.kinds)
            raise FrameError(f"a message with {self.key} {_repr(kind)}", f"one of {kinds}")
        if message.keys() - {self.key} != fields.keys():
            expected = f"the fields {sorted({self.key, *fields})}"
            raise FrameError(f"a message {kind} with the fields {_repr(sorted(message))}", expected)
        for name, field in fields.items():
            if not field.accepts(message[name]):
                raise FrameError(f"{kind}.{name} = {_repr(message[name])}", f"{field}")


def _repr(value: object) -> str:
    """Return the beginning of a value's repr, or its type if it has none (a huge integer)."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


_CALL_ID = Integer(0, _MAX_ID)
_CODE = Text(MAX_TEXT_CHARS, encodable=False)  # a policy may write what Python cannot compile
_OUTPUT = Text(MAX_TEXT_CHARS)
_RUN_KIND = Choice(("default", "clean", "edit"))  # the last two are for workspaces only

HOST_ORDERS = MessageTable(
    "order",
    {
        "open": {},
        "prepare": {},
        "run": {
            "id": _CALL_ID,
            "kind": _RUN_KIND,
            "code": _CODE,
            "timeout_s": Number(0.0, _MAX_TIMEOUT_S),
        },
        "cancel": {"id": _CALL_ID},
        "fork": {},
    },
)
"""From the host to the guest program and its supervisors."""

GUEST_EVENTS = MessageTable(
    "event",
    {
        "up": {},
        "opened": {},
        "forked": {},
        "started": {"id": _CALL_ID},
        "done": {
            "id": _CALL_ID,
            "end": Choice(("exit", "timeout", "cpu", "cancelled")),
            "code": Integer(-64, 255),  # the exit code, or minus the number of a signal
            "stdout": _OUTPUT,
            "stderr": _OUTPUT,
            "num_dropped_bytes": Integer(0, 2**62),
            "state_lost": Flag(),
            "alive": Flag(),
        },
        "failed": {"error": Text(1 << 16)},
    },
)
"""From the guest program and its supervisors to the host."""

INTERPRETER_ORDERS = MessageTable(
    "order",
    {
        "run": {"id": _CALL_ID, "kind": _RUN_KIND, "code": _CODE},
        "fork": {},
        "go": {"folder": Text(4096)},
    },
)
"""From a supervisor to an interpreter."""

INTERPRETER_EVENTS = MessageTable(
    "event",
    {
        "ready": {},
        "hello": {},
        "done": {"id": _CALL_ID, "code": Integer(0, 255)},
        "refused": {"errno": Integer(1, 4095)},
    },
)
"""From an interpreter, which the policy's code may have taken over, to its supervisor."""

WORKSPACE_ORDERS = MessageTable(
    "order",
    {
        "run": {"id": _CALL_ID, "kind": _RUN_KIND, "code": _CODE},
        "interrupt": {},
        "save": {},
    },
)
"""From a supervisor to the first process of a workspace (`workspace.process`)."""

WORKSPACE_EVENTS = MessageTable(
    "event",
    {
        "ready": {},
        "done": {"id": _CALL_ID, "code": Integer(0, 255)},
        "interrupted": {},
        "saved": {
            "state": Text(MAX_TEXT_CHARS, encodable=False),
            "num_background": Integer(0, 1 << 22),
        },
    },
)
"""From the first process of a workspace to its supervisor."""
