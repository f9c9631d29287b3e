"""Trees as text: every path, turn and decision is drawn once."""

from __future__ import annotations

from hypothesis import given, settings

from mega_agentrl.rollout.io.render import summary_line
from mega_agentrl.rollout.io.render_tree import decision_line, render_tree
from mega_agentrl.types.records import BranchDecision
from tests.rollout.grown_trees import grown, nested_tree


def _decision(**changes):
    values = {
        "position": 40,
        "num_slots_left": 1,
        "baseline_entropy": 0.5,
        "probe_entropies": (1.0, 2.0),
        "num_forks": 1,
    }
    return BranchDecision(path=(0,), **(values | changes))


def test_a_nested_tree():
    tree = nested_tree()
    ends = {one.path: summary_line(one) for one in tree.trajectories}
    asked = "H 2 over 8 tokens, baseline 1, dH +1, P 0.7 against 0.5: 1 fork"
    assert render_tree(tree).split("\n") == [
        "question set/0: Q",
        "  truth   1",
        "  4 paths: 3 forks, 0 top-ups",
        "0 agent | thinkhard<search>q1</search>",
        "  tool  | <result>ok:q1</result>",
        f"  asked at token 50 with 3 slots: {asked}",
        "  | 0.0 agent | more words<search>q1</search>",
        "  |     tool  | <result>ok:q1</result>",
        f"  |     asked at token 101 with 1 slot: {asked}",
        "  |     | 0.0.0 agent | more words<answer>1</answer>",
        f"  |     |       = {ends[0, 0, 0]}",
        "  |     agent | more words<answer>1</answer>",
        f"  |     = {ends[0, 0]}",
        "  agent | more words<search>q1</search>",
        "  tool  | <result>ok:q1</result>",
        f"  asked at token 101 with 1 slot: {asked}",
        "  | 0.1 agent | more words<answer>1</answer>",
        f"  |     = {ends[0, 1]}",
        "  agent | more words<answer>1</answer>",
        f"  = {ends[0,]}",
    ]


def test_what_was_decided_on_one_line():
    assert decision_line(_decision(probability=0.7, threshold=0.5)) == (
        "asked at token 40 with 1 slot: H 1.5 over 2 tokens, baseline 0.5, dH +1, "
        "P 0.7 against 0.5: 1 fork"
    )
    assert decision_line(_decision(num_forks=0, num_slots_left=2, probe_entropies=(0.25,))) == (
        "asked at token 40 with 2 slots: H 0.25 over 1 token, baseline 0.5, dH -0.25: no fork"
    )
    assert decision_line(_decision(num_forks=0, probe_entropies=())) == (
        "asked at token 40 with 1 slot: no fork"
    )


@settings(max_examples=40)
@given(grown())
def test_every_path_every_turn_and_every_decision_is_drawn_once(tree):
    text = render_tree(tree)
    assert text.count("= ") >= len(tree.trajectories)
    for one in tree.trajectories:
        assert f"= {summary_line(one)}" in text
    num_decisions = sum(len(one.decisions) for one in tree.trajectories)
    assert text.count("asked at token") == num_decisions
    num_own = sum(turn.start >= one.fork_len for one in tree.trajectories for turn in one.turns)
    assert text.count("agent |") + text.count("tool  |") == num_own
