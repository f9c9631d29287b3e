"""Hand-counted metrics of calls, a fork, a failure and a malformed tool name."""

from __future__ import annotations

import pytest

from mega_agentrl.rollout.metrics.tools import tool_metrics
from mega_agentrl.types.records import (
    Role,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)
from tests.fakes import make_prompt


def _outcome(tool="python", status=ToolStatus.ok, latency_s=1.0, **changes):
    return ToolOutcome(tool=tool, status=status, answer="", latency_s=latency_s, **changes)


def _trajectory(outcomes, *, fork_len=0, stop=StopReason.eos, **changes):
    """Two tokens a call: one said, one answered."""
    turns = []
    for index, outcome in enumerate(outcomes):
        at = 2 * index
        said = Turn(index=at, role=Role.assistant, start=at, stop=at + 1, text="")
        told = Turn(
            index=at + 1, role=Role.tool, start=at + 1, stop=at + 2, text="", outcome=outcome
        )
        turns += [said, told]
    size = 2 * len(outcomes)
    columns = ("token_ids", "loss_mask", "logps", "entropies", "versions", "turn_ids")
    return Trajectory(
        trajectory_id="t",
        prompt=make_prompt(),
        path=(0,),
        **{name: [0] * size for name in columns},
        turns=turns,
        stop_reason=stop,
        fork_len=fork_len,
        **changes,
    )


def test_by_hand():
    shared = _outcome(latency_s=1.0, queue_s=0.5, step_reward=0.5, metrics={"run_s": 2.0})
    root = _trajectory(
        [shared, _outcome(latency_s=3.0, status=ToolStatus.timeout)], tool_rewards={"gsm8k": 1.0}
    )
    fork = _trajectory(
        [shared, _outcome(latency_s=8.0, step_reward=-0.25, metrics={"run_s": 4.0})],
        fork_len=2,
        parent_id="t",
    )
    failed = _trajectory(
        [_outcome("search", ToolStatus.infra_error, 0.0, step_reward=9.0)],
        stop=StopReason.tool_failure,
    )
    got = tool_metrics([root, fork, failed])
    expected = {
        "tool/python/num_calls": 3,
        "tool/python/num_ok": 2,
        "tool/python/num_timeout": 1,
        "tool/python/num_user_error": 0,
        "tool/python/num_infra_error": 0,
        "tool/python/latency_mean_s": 4,
        "tool/python/latency_p50_s": 3,
        "tool/python/latency_p99_s": 8,
        "tool/python/latency_max_s": 8,
        "tool/python/queue_mean_s": 0.5 / 3,
        "tool/python/metric/run_s": 3,
        "tool/python/step_reward": (0.5 + 0.25) / 2,
        "tool/gsm8k/final_reward": 0.5,
        "tool/search/num_calls": 1,
        "tool/search/num_infra_error": 1,
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value), name
    assert "tool/search/step_reward" not in got, "a failed trajectory earned nothing"


def test_p99_of_two_hundred():
    calls = _trajectory([_outcome(latency_s=float(n)) for n in range(1, 201)])
    got = tool_metrics([calls])
    assert (got["tool/python/latency_p50_s"], got["tool/python/latency_p99_s"]) == (100, 198)


def test_a_name_the_policy_made_up_names_no_metric():
    got = tool_metrics([_trajectory([_outcome("a/b\n<think>"), _outcome("c d")])])
    assert got["tool/unknown/num_calls"] == 2
    assert {name.split("/")[1] for name in got} == {"unknown"}


def test_nothing_gives_nothing():
    assert tool_metrics([]) == {}
    assert tool_metrics([_trajectory([])]) == {}
