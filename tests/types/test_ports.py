"""The ports are Protocols that say, member by member, what an implementation promises."""

import inspect
from typing import Protocol

import pytest

from mega_agentrl.types import ports
from mega_agentrl.types.ports import Stateful

PORTS = [
    kind
    for _, kind in inspect.getmembers(ports, inspect.isclass)
    if kind.__module__ == ports.__name__
]
REQUIRED = {
    "Generator": {"generate", "abort", "entropies", "pause", "resume", "version"},
    "ToolSession": {"create", "execute", "fork", "calc_reward", "release"},
    "Policy": {"add_logprobs", "update", "supervise", "send_weights", "export", "close"},
    "Critic": {"add_values", "update", "close"},
    "RewardModel": {"scores", "close"},
    "WeightSource": {"layout", "join", "send"},
    "WeightSink": {"layout", "connect_weights", "receive_weights"},
    "UserSession": {"create", "respond", "fork", "calc_reward", "release"},
    "Interactions": {"open"},
    "ChatCodec": {"apply_chat", "apply_next_turn", "raw_text", "end_text"},
    "Stateful": {"state_dict", "load_state_dict"},
    "PromptSource": {"next", "settle", "put_back"},
}


def members(kind):
    found = {}
    for name, member in vars(kind).items():
        target = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(target):
            found[name] = target
    return found


class Counter:
    """A controller whose whole state is one number."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("kind", PORTS, ids=lambda kind: kind.__name__)
def test_every_port_is_a_protocol_and_every_member_documented_and_annotated(kind):
    assert Protocol in kind.__mro__
    for name, member in members(kind).items():
        assert inspect.getdoc(member), f"{kind.__name__}.{name}"
        signature = inspect.signature(member)
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in list(signature.parameters.values())[1:]:
            assert parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize(("name", "expected"), REQUIRED.items())
def test_the_ports_are_complete(name, expected):
    assert expected <= set(members(getattr(ports, name)))


@pytest.mark.parametrize("name", ["Generator", "ToolSession"])
def test_calls_that_wait_are_coroutines(name):
    kind = getattr(ports, name)
    for member, function in members(kind).items():
        if not isinstance(vars(kind)[member], property):
            assert inspect.iscoroutinefunction(function), member


def test_anything_with_a_state_is_stateful():
    counter, copy = Counter(), Counter()
    assert isinstance(counter, Stateful)
    assert not isinstance(object(), Stateful)
    counter.count = 7
    copy.load_state_dict(counter.state_dict())
    assert copy.count == 7
