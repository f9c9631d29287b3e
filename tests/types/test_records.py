"""Records check their lengths; infrastructure failures are told from low rewards."""

import dataclasses

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import (
    FinishReason,
    Generation,
    Prompt,
    Role,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)

PER_TOKEN = ("token_ids", "loss_mask", "logps", "entropies", "versions", "turn_ids")
PROMPT = Prompt(
    prompt_id="toolqa/0",
    data_source="toolqa",
    messages=({"role": "user", "content": "1+1?"},),
    ground_truth="2",
    token_ids=(1, 2, 3),
)


def trajectory(num_tokens=3, **changes):
    values = {
        "trajectory_id": "toolqa/0#0",
        "prompt": PROMPT,
        "path": (0,),
        "token_ids": list(range(num_tokens)),
        "loss_mask": [1] * num_tokens,
        "logps": [-0.5] * num_tokens,
        "entropies": [0.5] * num_tokens,
        "versions": [0] * num_tokens,
        "turn_ids": [0] * num_tokens,
        "turns": [],
        "stop_reason": StopReason.eos,
    }
    return Trajectory(**(values | changes))


def generation(**changes):
    values = {
        "request_id": "r0",
        "token_ids": (5, 6),
        "logps": (-0.1, -0.2),
        "entropies": (0.3, 0.4),
        "argmax_ids": (5, 7),
        "finish_reason": FinishReason.stop,
        "stop_string": "</python>",
        "version": 4,
    }
    return Generation(**(values | changes))


@pytest.mark.parametrize("name", PER_TOKEN)
def test_every_per_token_list_of_a_trajectory_has_one_length(name):
    with pytest.raises(InputError) as caught:
        trajectory(**{name: [0, 0]})
    assert "toolqa/0#0" in caught.value.name
    assert caught.value.got[name] == 2


@pytest.mark.parametrize("name", ["token_ids", "logps", "entropies", "argmax_ids", "versions"])
def test_every_per_token_tuple_of_a_generation_has_one_length(name):
    with pytest.raises(InputError) as caught:
        generation(**{name: (0,)})
    assert "r0" in caught.value.name
    assert caught.value.got[name] == 1


def test_argmax_ids_are_recorded_for_all_tokens_or_for_none():
    assert not trajectory().argmax_ids
    assert list(trajectory(argmax_ids=[4, 5, 6]).argmax_ids) == [4, 5, 6]
    with pytest.raises(InputError) as caught:
        trajectory(argmax_ids=[4, 5])
    assert caught.value.got["argmax_ids"] == 2


def test_an_empty_generation_and_an_empty_trajectory_are_records_too():
    empty = {name: () for name in ("token_ids", "logps", "entropies", "argmax_ids")}
    assert generation(**empty, finish_reason=FinishReason.aborted, stop_string=None).token_ids == ()
    assert trajectory(0).response_text == ""


@pytest.mark.parametrize("fork_len", [-1, 4])
def test_a_fork_shares_no_more_than_there_is(fork_len):
    with pytest.raises(InputError) as caught:
        trajectory(fork_len=fork_len)
    assert caught.value.got == fork_len
    assert trajectory(fork_len=3).fork_len == 3


@pytest.mark.parametrize("reason", list(StopReason))
def test_only_infrastructure_failures_are_failures(reason):
    failures = {
        StopReason.tool_failure,
        StopReason.agent_failure,
        StopReason.aborted,
        StopReason.trajectory_timeout,
    }
    assert trajectory(stop_reason=reason).failed is (reason in failures)


def tool_turn(tool="t", **outcome):
    values = {"status": ToolStatus.ok, "answer": "", "latency_s": 0.0}
    outcome = ToolOutcome(tool=tool, **(values | outcome))
    return Turn(index=0, role=Role.tool, start=3, stop=3, text="", outcome=outcome)


def test_invalid_calls_are_counted_by_their_outcomes():
    turns = [tool_turn(is_invalid_call=is_invalid) for is_invalid in (True, False, True)]
    assert trajectory(turns=turns).num_invalid_calls == 2
    assert trajectory().num_invalid_calls == 0


def test_response_text_is_every_turn_in_order():
    turns = [
        Turn(index=0, role=Role.assistant, start=0, stop=2, text="<python> 1+1 </python>"),
        Turn(index=1, role=Role.tool, start=2, stop=3, text=" <result>\n2\n</result>"),
    ]
    assert trajectory(turns=turns).response_text == turns[0].text + turns[1].text


def test_step_rewards_are_by_tool_in_order_of_the_calls():
    rewards = [("a", 1.0), ("b", 0.5), ("a", -1.0)]
    turns = [tool_turn(tool, step_reward=reward) for tool, reward in rewards]
    assert trajectory(turns=turns).step_rewards == {"a": [1.0, -1.0], "b": [0.5]}
    assert trajectory().step_rewards == {}


def test_prompts_and_generations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROMPT.ground_truth = "3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        generation().version = 5


def test_a_tool_session_error_names_the_tool_and_carries_the_outcome():
    outcome = ToolOutcome(
        tool="notes", status=ToolStatus.infra_error, answer="create: no disk", latency_s=0.5
    )
    error = ToolSessionError(outcome)
    assert isinstance(error, RuntimeError)
    assert str(error) == "tool notes: create: no disk"
    assert error.outcome is outcome


def test_the_repr_of_a_trajectory_leaves_out_its_tokens():
    turn = Turn(index=0, role=Role.assistant, start=0, stop=9999, text="word " * 9999)
    shown = repr(trajectory(9999, turns=[turn], parent_id="toolqa/0#1", fork_len=7))
    assert all(part in shown for part in ("toolqa/0#0", "9999 tokens", "token 7", "stop", "word "))
    assert len(shown) < 200
