"""Every protocol has its members, documented and annotated."""

import dataclasses
import inspect
from typing import Protocol

import pytest

from mega_agentrl.report.trackers.mlflow import MlflowTracker
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker
from mega_agentrl.report.trackers.wandb import WandbTracker
from mega_agentrl.types import protocols
from mega_agentrl.types.components import Components
from mega_agentrl.types.monitoring import Tracker
from mega_agentrl.types.protocols import Stateful

PROTOCOLS = [
    kind
    for _, kind in inspect.getmembers(protocols, inspect.isclass)
    if kind.__module__ == protocols.__name__
]
TRACKERS = [TensorBoardTracker, WandbTracker, MlflowTracker, PrometheusTracker]
REQUIRED = {
    "Generator": {"generate", "abort", "entropies", "pause", "resume", "version"},
    "ToolSession": {"create", "execute", "fork", "calc_reward", "release"},
    "Policy": {"compute_log_probs", "update", "sft_step", "sync_weights", "export_hf", "close"},
    "Critic": {"compute_values", "update", "close"},
    "RewardModel": {"compute_scores", "close"},
    "WeightSource": {"layout", "join_transfer_group", "send_weights"},
    "WeightSink": {"layout", "join_weight_transfer", "receive_weights"},
    "UserSimulatorSession": {"create", "respond", "fork", "calc_reward", "release"},
    "InteractionProvider": {"open_session"},
    "ChatCodec": {
        "apply_chat_template",
        "encode_next_turn",
        "decode_with_special_tokens",
        "turn_end_text",
    },
    "Stateful": {"state_dict", "load_state_dict"},
    "PromptSource": {"next_prompts", "ack", "nack"},
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
        self.num_rows = 0

    def state_dict(self):
        return {"count": self.num_rows}

    def load_state_dict(self, state):
        self.num_rows = state["count"]


@pytest.mark.parametrize("kind", PROTOCOLS, ids=lambda kind: kind.__name__)
def test_every_class_is_a_protocol_and_every_member_documented_and_annotated(kind):
    assert Protocol in kind.__mro__
    for name, member in members(kind).items():
        assert inspect.getdoc(member), f"{kind.__name__}.{name}"
        signature = inspect.signature(member)
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in list(signature.parameters.values())[1:]:
            assert parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize(("name", "expected"), REQUIRED.items())
def test_protocols_are_complete(name, expected):
    assert expected <= set(members(getattr(protocols, name)))


@pytest.mark.parametrize("name", ["Generator", "ToolSession"])
def test_calls_that_wait_are_coroutines(name):
    kind = getattr(protocols, name)
    for member, function in members(kind).items():
        if not isinstance(vars(kind)[member], property):
            assert inspect.iscoroutinefunction(function), member


def test_anything_with_a_state_is_stateful():
    counter, copy = Counter(), Counter()
    assert isinstance(counter, Stateful)
    assert not isinstance(object(), Stateful)
    counter.num_rows = 7
    copy.load_state_dict(counter.state_dict())
    assert copy.num_rows == 7


def test_components_are_typed_by_protocol():
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Components)}
    given = {"policy", "generator", "tools", "codec", "rubric", "prompt_source"}
    assert given <= set(kinds)
    assert all(hasattr(protocols, kinds[name]) for name in given)


@pytest.mark.parametrize("kind", TRACKERS)
@pytest.mark.parametrize("method", ["log_config", "log", "close"])
def test_trackers_have_the_signatures_of_the_protocol(kind, method):
    expected = inspect.signature(getattr(Tracker, method))
    assert inspect.signature(getattr(kind, method)) == expected
