"""Tables of messages: what is accepted at each bound, and what is refused."""

import pytest

from mega_agentrl.sandbox.guest import messages
from mega_agentrl.sandbox.guest.messages import (
    GUEST_EVENTS,
    HOST_ORDERS,
    INTERPRETER_EVENTS,
    INTERPRETER_ORDERS,
    FrameError,
)

DONE = {
    "event": "done",
    "id": 3,
    "end": "exit",
    "code": 0,
    "stdout": "é",
    "stderr": "",
    "num_dropped_bytes": 0,
    "state_lost": False,
    "alive": True,
}
RUN = {"order": "run", "id": 1, "kind": "default", "code": "1", "timeout_s": 2.5}

VALID = {
    "done": (GUEST_EVENTS, DONE),
    "ended by the last signal": (GUEST_EVENTS, DONE | {"code": -64}),
    "largest exit code": (GUEST_EVENTS, DONE | {"code": 255}),
    "run": (HOST_ORDERS, RUN),
    "whole seconds": (HOST_ORDERS, RUN | {"timeout_s": 0}),
    "surrogate in code": (HOST_ORDERS, RUN | {"code": "\ud800"}),
    "go": (INTERPRETER_ORDERS, {"order": "go", "folder": ""}),
    "refused": (INTERPRETER_EVENTS, {"event": "refused", "errno": 4095}),
}
INVALID = {
    "no kind": (GUEST_EVENTS, {}),
    "kind of another table": (GUEST_EVENTS, RUN),
    "unknown kind": (INTERPRETER_EVENTS, {"event": "opened"}),
    "list as kind": (INTERPRETER_EVENTS, {"event": ["done"], "code": 0}),
    "missing field": (INTERPRETER_EVENTS, {"event": "done"}),
    "unexpected field": (INTERPRETER_EVENTS, {"event": "done", "id": 1, "code": 0, "more": 1}),
    "signal too high": (GUEST_EVENTS, DONE | {"code": -65}),
    "code too high": (GUEST_EVENTS, DONE | {"code": 256}),
    "code as float": (GUEST_EVENTS, DONE | {"code": 0.0}),
    "code as flag": (INTERPRETER_EVENTS, {"event": "done", "id": 1, "code": True}),
    "huge code": (INTERPRETER_EVENTS, {"event": "done", "id": 1, "code": 10**5000}),
    "flag as integer": (GUEST_EVENTS, DONE | {"alive": 1}),
    "unknown end": (GUEST_EVENTS, DONE | {"end": "won"}),
    "unhashable end": (GUEST_EVENTS, DONE | {"end": []}),
    "text as list": (GUEST_EVENTS, DONE | {"stdout": ["x"]}),
    "surrogate in output": (GUEST_EVENTS, DONE | {"stdout": "\ud800"}),
    "infinite": (HOST_ORDERS, RUN | {"timeout_s": float("inf")}),
    "not a number": (HOST_ORDERS, RUN | {"timeout_s": float("nan")}),
    "negative time": (HOST_ORDERS, RUN | {"timeout_s": -0.1}),
    "flag as time": (HOST_ORDERS, RUN | {"timeout_s": True}),
    "long folder": (INTERPRETER_ORDERS, {"order": "go", "folder": "x" * 4097}),
    "errno 0": (INTERPRETER_EVENTS, {"event": "refused", "errno": 0}),
    "errno as list": (INTERPRETER_EVENTS, {"event": "refused", "errno": []}),
}


@pytest.mark.parametrize("name", VALID)
def test_messages_of_the_table_are_accepted(name):
    table, message = VALID[name]
    table.check(message)


@pytest.mark.parametrize("name", INVALID)
def test_messages_outside_of_the_table_are_refused(name):
    table, message = INVALID[name]
    with pytest.raises(FrameError) as refused:
        table.check(message)
    assert len(str(refused.value)) < 400


def test_kinds_of_one_channel_differ():
    """A message that is sent back is never one that its sender accepts."""
    for one, other in ((HOST_ORDERS, GUEST_EVENTS), (INTERPRETER_ORDERS, INTERPRETER_EVENTS)):
        assert one.key != other.key


def test_each_field_has_a_type():
    for table in (HOST_ORDERS, GUEST_EVENTS, INTERPRETER_ORDERS, INTERPRETER_EVENTS):
        for fields in table.kinds.values():
            assert all(isinstance(field, messages.FieldType) for field in fields.values())
            assert table.key not in fields
