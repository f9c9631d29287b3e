"""Metrics counted by hand, and branching metrics against the nodes of the tree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.io.nodes import to_node_tree
from mega_agentrl.rollout.metrics.names import MAX_NAMES, NamesOfRun
from mega_agentrl.rollout.metrics.rollout import (
    branch_metrics,
    greedy_metrics,
    reward_metrics,
    rollout_metrics,
    tool_metrics,
)
from mega_agentrl.types.records import Role, RolloutTree, Score, StopReason, ToolOutcome, ToolStatus
from tests.fakes import FakeRubric, make_context, make_prompt, make_trajectory
from tests.rollout.grown_trees import grown, nested_tree

PROMPT = make_prompt()


def _score(value, correct, **parts):
    return Score(value=value, correct=correct, f1=0.0, answer="", reason="", parts=parts)


AGENT, TOOL = Role.assistant, Role.tool


def _tree():
    spans = [(AGENT, 2), (TOOL, 1), (AGENT, 2)]
    root = make_trajectory(
        (0,), spans, entropies=[1, 1, 0, 3, 3], score=_score(1.0, True), num_tool_calls=1
    )
    fork = make_trajectory(
        (0, 0),
        spans,
        entropies=[1, 1, 0, 5, 5],
        score=_score(0.5, False),
        num_tool_calls=1,
        parent_id="0",
        fork_len=3,
        stop_reason=StopReason.length,
    )
    failed = make_trajectory((1,), [(AGENT, 1)], entropies=[9], stop_reason=StopReason.aborted)
    trajectories = [root, fork, failed]
    return RolloutTree(prompt=PROMPT, trajectories=trajectories, num_forks=1, num_extra_roots=0)


def test_metrics_of_a_tree_are_those_worked_out_by_hand():
    got = rollout_metrics([_tree()])
    expected = {
        "reward_mean": 0.75,
        "success": 0.5,
        "reward_min": 0.5,
        "reward_max": 1.0,
        "response_tokens_mean": 5,
        "response_tokens_min": 5,
        "response_tokens_max": 5,
        "prompt_tokens_mean": len(PROMPT.token_ids),
        "prompt_tokens_max": len(PROMPT.token_ids),
        "sampled_tokens_mean": 4,
        "num_turns_mean": 2,
        "failed_fraction": 1 / 3,
        "num_trajectories": 3,
        "forks_per_prompt": 1,
        "extra_roots_per_prompt": 0,
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
    assert got["reward/failed_fraction"] == 0


def test_requests_of_agents_are_counted_and_their_fields_without_effect_as_shares():
    counts = [
        {"requests": 3, "branches": 1, "ignored/seed": 3, "ignored/min_p": 1},
        {"requests": 1, "branches": 0, "ignored/seed": 1},
    ]
    paths = [
        make_trajectory((index,), [(AGENT, 2)], request_counts=item)
        for index, item in enumerate(counts)
    ]
    got = rollout_metrics([RolloutTree(prompt=PROMPT, trajectories=paths)])
    assert {name: value for name, value in got.items() if "/agent/" in name} == {
        "rollout/agent/requests_mean": 2,
        "rollout/agent/branches_mean": 0.5,
        "rollout/agent/ignored/seed": 1,
        "rollout/agent/ignored/min_p": 0.25,
    }


def test_the_window_bounds_the_entropies_of_a_turn():
    one = make_trajectory((0,), [(AGENT, 21)], entropies=[1, 2] * 10 + [30])
    tree = RolloutTree(prompt=PROMPT, trajectories=[one])
    got = rollout_metrics([tree])
    assert got["rollout/entropy_root"] == 1.5 and got["rollout/entropy"] == 60 / 21


def test_lengths_are_those_of_prompts_and_valid_responses():
    short, long = make_trajectory((0,), [(AGENT, 2)]), make_trajectory((1,), [(AGENT, 7)])
    failed = make_trajectory((2,), [(AGENT, 90)], stop_reason=StopReason.aborted)
    trees = [
        RolloutTree(prompt=make_prompt(token_ids=(1,) * 4), trajectories=[short, failed]),
        RolloutTree(prompt=make_prompt(token_ids=(1,) * 10), trajectories=[long]),
    ]
    got = rollout_metrics(trees)
    lengths = [got[f"rollout/response_tokens_{name}"] for name in ("min", "mean", "max")]
    assert lengths == [2, 4.5, 7]
    assert [got[f"rollout/prompt_tokens_{name}"] for name in ("mean", "max")] == [7, 10]


def test_metrics_of_no_trees_are_zeros():
    assert set(rollout_metrics([]).values()) == {0.0}


def test_branch_metrics_of_the_nested_tree_are_those_worked_out_by_hand():
    tree = nested_tree()
    first, second = (28 + 22, 28 + 22 + 29 + 22)
    # 0 is whole; 0.0 takes over the first turn, 0.0.0 and 0.1 the first two, 28 and 29 sampled.
    assert [one.fork_len for one in tree.trajectories] == [0, first, second, second]
    held = sum(sum(one.loss_mask) for one in tree.trajectories)
    assert branch_metrics([tree]) == pytest.approx(
        {
            "forks_per_prompt": 3,
            "extra_roots_per_prompt": 0,
            "decisions_per_prompt": 3,
            "fork_rate": 1,
            "delta_h": 1,
            "tokens_saved_fraction": (28 + 57 + 57) / held,
            "calls_saved_fraction": (1 + 2 + 2) / 8,
        }
    )


def test_decisions_that_did_not_fork_count_too():
    got = branch_metrics([nested_tree(), nested_tree(after=0.5)])
    assert got["decisions_per_prompt"] == 2.5 and got["fork_rate"] == 0.6
    assert got["delta_h"] == pytest.approx((3 * 1.0 - 2 * 0.5) / 5)
    assert got["forks_per_prompt"] == 1.5 and got["extra_roots_per_prompt"] == 1.5


@settings(max_examples=40)
@given(grown())
def test_the_saved_fraction_counts_shared_tokens(tree):
    nodes = to_node_tree(tree)
    held = sum(sum(one.loss_mask) for one in tree.trajectories)
    sampled = sum(sum(node.loss_mask) for node in nodes.nodes)
    got = branch_metrics([tree])["tokens_saved_fraction"]
    assert got == pytest.approx(1 - sampled / held if held else 0)
    assert (got > 0) == (tree.num_forks > 0)


async def test_the_gap_of_the_entropy_estimate_is_measured_when_asked_for():
    gaps = []
    for top_k in (0, 1):
        config = RolloutConfig(group_size=4, branch=BranchConfig(entropy_estimate_top_k=top_k))
        context = make_context(config, max_model_len=200, step=1)
        (tree,) = await collect_rollouts([make_prompt()], FakeRubric(), context)
        gaps.append(branch_metrics([tree]).get("topk_entropy_gap"))
    assert gaps[0] is None
    assert gaps[1] > 0


def test_without_decisions_there_is_no_mean_entropy_change():
    assert "delta_h" not in branch_metrics([])
    assert set(branch_metrics([]).values()) == {0.0}


def _tool_outcome(tool="python", status=ToolStatus.ok, latency_s=1.0, **changes):
    return ToolOutcome(tool=tool, status=status, answer="", latency_s=latency_s, **changes)


def _tool_trajectory(outcomes, **changes):
    """Two tokens a call: one sampled, one of the answer."""
    return make_trajectory(
        (0,), [(AGENT, 1), (TOOL, 1)] * len(outcomes), outcomes=outcomes, **changes
    )


def test_tool_metrics_count_shared_calls_once():
    shared = _tool_outcome(latency_s=1.0, queue_s=0.5, step_reward=0.5, metrics={"run_s": 2.0})
    root = _tool_trajectory(
        [shared, _tool_outcome(latency_s=3.0, status=ToolStatus.timeout)],
        tool_rewards={"gsm8k": 1.0},
    )
    fork = _tool_trajectory(
        [shared, _tool_outcome(latency_s=8.0, step_reward=-0.25, metrics={"run_s": 4.0})],
        fork_len=2,
        parent_id="t",
    )
    failed = _tool_trajectory(
        [_tool_outcome("search", ToolStatus.infra_error, 0.0, step_reward=9.0)],
        stop_reason=StopReason.tool_failure,
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


def test_percentiles_are_measured_values():
    calls = _tool_trajectory([_tool_outcome(latency_s=float(n)) for n in range(1, 201)])
    got = tool_metrics([calls])
    assert (got["tool/python/latency_p50_s"], got["tool/python/latency_p99_s"]) == (100, 198)


def test_a_name_the_policy_made_up_names_no_metric():
    got = tool_metrics([_tool_trajectory([_tool_outcome("a/b\n<think>"), _tool_outcome("c d")])])
    assert got["tool/unknown/num_calls"] == 2
    assert {name.split("/")[1] for name in got} == {"unknown"}


def test_without_calls_there_are_no_tool_metrics():
    assert tool_metrics([]) == {}
    assert tool_metrics([_tool_trajectory([])]) == {}


def _scored(parts, fields, reward_error=""):
    one = make_trajectory(reward_error=reward_error)
    if not reward_error:
        one.score = Score(
            value=0.0, correct=False, f1=0.0, answer="", reason="", parts=parts, extra_info=fields
        )
    return one


def test_reward_metrics_are_means_of_parts_and_numeric_fields():
    rows = [
        _scored({"arpo": 1.0, "mine": 0.5}, {"mine": {"right": True, "len": 4, "why": "x"}}),
        _scored({"arpo": 0.0, "mine": 0.0}, {"mine": {"right": False, "len": float("inf")}}),
        _scored({}, {}, reward_error="hung"),
        _scored({}, {}),
    ]
    assert reward_metrics(rows) == {
        "reward/failed_fraction": 0.25,
        "reward/arpo": 0.5,
        "reward/mine": 0.25,
        "reward/mine/right": 0.5,
        "reward/mine/len": 4.0,
    }
    assert reward_metrics([]) == {"reward/failed_fraction": 0.0}


def test_greedy_metrics_leave_lost_rewards_out():
    tokens = {name: [0] * 3 for name in ("token_ids", "logps", "entropies", "versions", "turn_ids")}
    score = Score(value=0.5, correct=True, f1=1.0, answer="", reason="")
    good = make_trajectory(loss_mask=[1, 0, 1], score=score, **tokens)
    lost = make_trajectory(loss_mask=[1, 1, 1], reward_error="nobody knows", **tokens)
    trees = [
        RolloutTree(prompt=PROMPT, trajectories=[], greedy_trajectory=one) for one in (good, lost)
    ]
    found = greedy_metrics(trees)
    assert found["greedy_reward"] == 0.5 and found["greedy_success"] == 1.0
    assert found["greedy_failed"] == 0.5
    assert (found["greedy_tokens"], found["greedy_calls"]) == (5.0, 0.0)
    assert greedy_metrics([replace(trees[0], greedy_trajectory=None)]) == {}


def _called(*outcomes, **changes):
    """A trajectory with one turn of a tool for each outcome."""
    one = make_trajectory((0,), [(AGENT, 2), (TOOL, 1)], **changes)
    turn = one.turns[1]
    one.turns[1:] = [replace(turn, outcome=outcome) for outcome in outcomes]
    return one


def _outcome(tool, *, is_invalid_call=False, **metrics):
    return ToolOutcome(
        tool=tool,
        status=ToolStatus.user_error if is_invalid_call else ToolStatus.ok,
        answer="",
        latency_s=0.0,
        is_invalid_call=is_invalid_call,
        metrics=metrics,
    )


def test_names_that_others_choose_make_a_bounded_number_of_metrics():
    tools = [_outcome(f"tool{index}", **{f"m{index}": 1.0}) for index in range(5000)]
    fields = {f"field{index}": 1.0 for index in range(5000)}
    counts = {"requests": 1, "branches": 0, **{f"ignored/f{index}": 1 for index in range(5000)}}
    one = _called(*tools, *[_outcome("python")] * 9, request_counts=counts)
    one.score = replace(_score(1.0, True), extra_info={"mine": fields})
    got = rollout_metrics([RolloutTree(prompt=PROMPT, trajectories=[one])])
    for head, total in (
        ("rollout/calls/", 5009),
        ("reward/mine/", 65),
        ("rollout/agent/ignored/", 5000),
    ):
        values = [value for name, value in got.items() if name.startswith(head)]
        assert (len(values), sum(values)) == (MAX_NAMES + 1, total)
    names = {name.split("/")[2] for name in got if name.startswith("rollout/tool/")}
    assert len(names) == MAX_NAMES + 1 and {"python", "other"} <= names
    assert got["rollout/calls/python"] == 9
    other = [name for name in got if name.startswith("rollout/tool/other/metric/")]
    assert len(other) == MAX_NAMES + 1


def test_new_names_in_each_step_make_as_many_metrics_of_a_run_as_in_one_step():
    names = NamesOfRun()
    keys = set()
    for step in range(20):
        one = _called(*(_outcome(f"tool_{step}_{number}", new=step) for number in range(9)))
        one.request_counts = {"requests": 1, **{f"ignored/{step}_{n}": 1 for n in range(9)}}
        fields = {f"{step}_{number}": 1.0 for number in range(9)}
        one.score = replace(_score(1.0, True), extra_info={"mine": fields})
        got = rollout_metrics([RolloutTree(prompt=PROMPT, trajectories=[one])], names)
        assert sum(got[name] for name in got if name.startswith("rollout/calls/")) == 9
        keys |= got.keys()
    for head in ("rollout/calls/", "rollout/agent/ignored/", "reward/mine/"):
        assert sum(key.startswith(head) for key in keys) == MAX_NAMES + 1
        assert {f"{head}other"} < keys
    assert {"rollout/calls/tool_0_0", "rollout/calls/tool_6_0"} < keys


def test_names_that_a_run_has_had_keep_their_metrics():
    names = NamesOfRun()
    for number in (0, *range(1, 100), 0):
        one = _called(_outcome(f"tool_{number}"), *[_outcome(f"new_{number}")] * 9)
        got = rollout_metrics([RolloutTree(prompt=PROMPT, trajectories=[one])], names)
    assert (got["rollout/calls/tool_0"], got["rollout/calls/new_0"]) == (1, 9)


def test_names_of_no_tool_are_unknown_and_those_of_a_prompt_are_kept():
    schema = {"type": "function", "function": {"name": "search"}}
    wrong = [_outcome(name, is_invalid_call=True) for name in ("search", "made_up", "a b", "<x>\n")]
    one = _called(*wrong, _outcome("run"), _outcome("run", is_invalid_call=True))
    one.prompt = replace(one.prompt, tool_schemas=(schema,))
    got = rollout_metrics([RolloutTree(prompt=one.prompt, trajectories=[one])])
    calls = {name: value for name, value in got.items() if name.startswith("rollout/calls/")}
    assert calls == {
        "rollout/calls/search": 1,
        "rollout/calls/run": 2,
        "rollout/calls/unknown": 3,
    }


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, -math.inf, math.nan, 1e-320])
def test_metrics_survive_every_number(value):
    ones = [_called(_outcome("run", big=value)) for _ in range(3)]
    for one in ones:
        one.tool_rewards = {"run": value}
        one.score = replace(_score(1.0, True), extra_info={"mine": {"big": value}})
    got = rollout_metrics([RolloutTree(prompt=PROMPT, trajectories=ones)])
    if abs(value) < 1e309:
        assert got["reward/mine/big"] == pytest.approx(value)
        assert got["rollout/tool/run/metric/big"] == pytest.approx(value)
    else:
        assert "reward/mine/big" not in got
