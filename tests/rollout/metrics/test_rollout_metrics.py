"""Hand-counted metrics of a tree with a call, a fork and a failure."""

from __future__ import annotations

import pytest

from mega_agentrl.rollout.metrics.rollout import rollout_metrics
from mega_agentrl.types.records import (
    Role,
    RolloutTree,
    Score,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)
from tests.fakes import make_prompt

PROMPT = make_prompt()


def _outcome(status=ToolStatus.ok):
    return ToolOutcome(tool="python", status=status, answer="2", latency_s=0.5)


def _trajectory(path, spans, entropies, *, score=None, stop=StopReason.eos, **changes):
    """spans: (author, length) per turn."""
    turns, mask, ids, at = [], [], [], 0
    for index, (author, length) in enumerate(spans):
        said = author is Role.assistant
        turns.append(
            Turn(
                index=index,
                role=author,
                start=at,
                stop=at + length,
                text="t",
                outcome=None if said else _outcome(),
            )
        )
        mask += [int(said)] * length
        ids += [index] * length
        at += length
    return Trajectory(
        trajectory_id=str(path),
        prompt=PROMPT,
        path=path,
        token_ids=[1] * at,
        loss_mask=mask,
        logps=[0.0] * at,
        entropies=entropies,
        versions=[1] * at,
        turn_ids=ids,
        turns=turns,
        stop_reason=stop,
        num_tool_calls=len(turns) // 2,
        score=score,
        **changes,
    )


def _score(value, correct, **parts):
    return Score(value=value, correct=correct, f1=0.0, answer="", reason="", parts=parts)


AGENT, TOOL = Role.assistant, Role.tool


def _tree():
    spans = [(AGENT, 2), (TOOL, 1), (AGENT, 2)]
    root = _trajectory((0,), spans, [1, 1, 0, 3, 3], score=_score(1.0, True))
    fork = _trajectory(
        (0, 0),
        spans,
        [1, 1, 0, 5, 5],
        score=_score(0.5, False),
        parent_id="(0,)",
        fork_len=3,
        stop=StopReason.length,
    )
    failed = _trajectory((1,), [(AGENT, 1)], [9], stop=StopReason.aborted)
    trajectories = [root, fork, failed]
    return RolloutTree(prompt=PROMPT, trajectories=trajectories, num_forks=1, num_top_ups=0)


def test_by_hand():
    got = rollout_metrics([_tree()])
    expected = {
        "reward_mean": 0.75,
        "success": 0.5,
        "response_tokens_mean": 5,
        "sampled_tokens_mean": 4,
        "num_turns_mean": 2,
        "failed_fraction": 1 / 3,
        "num_trajectories": 3,
        "forks_per_prompt": 1,
        "top_ups_per_prompt": 0,
        "truncated_fraction": 1 / 3,
        "invalid_calls_mean": 0,
        "template_drift_fraction": 0,
        "decisions_per_prompt": 0,
        "tokens_saved_fraction": 2 / 9,
        "calls_saved_fraction": 1 / 2,
        "stop/eos": 1 / 3,
        "stop/length": 1 / 3,
        "stop/aborted": 1 / 3,
        "stop/tool_failure": 0,
        "tool_use_fraction": 1,
        "tool_calls_mean": 1,
        "calls/python": 1,
        "tool_success_rate": 1,
        "tool_latency_mean_s": 0.5,
        "tool/python/num_calls": 1,
        "tool/python/num_ok": 1,
        "tool/python/step_reward": 0,
        "entropy": (1 + 1 + 3 + 3 + 5 + 5 + 9) / 7,
        "entropy_root": (1 + 1 + 9) / 3,
        "entropy_after_tool": 4,
        "entropy_root/0": 11 / 3,
        "entropy_after_tool/0": 4,
    }
    for name, value in expected.items():
        assert got[f"rollout/{name}"] == pytest.approx(value), name
    assert sum(value for name, value in got.items() if "/stop/" in name) == pytest.approx(1)


def test_parts_of_the_reward():
    tree = _tree()
    tree.trajectories[0].score = _score(1.0, True, rule=0.5, search=0.5)
    tree.trajectories[1].score = _score(0.5, True, rule=0.5)
    got = rollout_metrics([tree])
    assert got["reward/rule"] == 0.5
    assert got["reward/search"] == 0.5
    assert got["reward/failed_fraction"] == 0.0


def test_the_window_bounds_the_entropies_of_a_turn():
    tree = RolloutTree(prompt=PROMPT, trajectories=[_trajectory((0,), [(AGENT, 3)], [1, 2, 30])])
    assert rollout_metrics([tree], window=2)["rollout/entropy_root"] == 1.5
    assert rollout_metrics([tree])["rollout/entropy_root"] == 11


def test_nothing_gives_zeros():
    assert set(rollout_metrics([]).values()) == {0.0}
