"""Trajectories and trees as text: every path, turn and decision is drawn once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.io.render import (
    decision_line,
    render_trajectory,
    render_tree,
    summary_line,
)
from mega_agentrl.types.records import BranchDecision, ToolStatus
from tests.fakes import (
    EOS,
    FakeGenerator,
    FakeRubric,
    FakeTools,
    make_context,
    make_prompt,
    turns,
)
from tests.rollout.grown_trees import CALL, END, grown, nested_tree, part


def _one(*texts, **tools):
    generator, tools = FakeGenerator(turns(*texts)), FakeTools(**tools)
    context = make_context(RolloutConfig(group_size=1), generator=generator, tools=tools)
    prompts = [make_prompt("set/7", question="how?", token_ids=(63,))]
    (tree,) = asyncio.run(collect_rollouts(prompts, FakeRubric(), context))
    return tree.trajectories[0]


def test_question_turns_and_score_are_shown():
    one = _one("think\nhard<search>q1</search>", f" <answer>1</answer>{EOS}")
    assert one.score is not None
    assert render_trajectory(one).split("\n") == [
        "question set/7: how?",
        "  truth   1",
        "  agent | think",
        "        | hard<search>q1</search>",
        "  tool  | <result>ok:q1</result>",
        "  agent | <answer>1</answer>",
        "  tools   python: final 1",
        f"  reward {one.score.value:g}, correct, stop eos, {len(one.token_ids)} tokens, 1 call",
    ]


def test_a_failure_shows_the_tool_outcome_and_no_score():
    one = _one(CALL, status=lambda text: ToolStatus.infra_error)
    lines = render_trajectory(one).split("\n")
    assert lines[-2] == "  tool  | (infra_error, not shown to the agent) ok:q1"
    assert lines[-1].strip().startswith("failed, not scored, stop tool_failure, 19 tokens")


def test_a_fork_names_its_parent():
    one = _one(END)
    one.path, one.parent_id, one.fork_len = (0, 1, 0), "x", 4
    assert render_trajectory(one).endswith("forked at token 4 of 0.1")


def test_rewards_of_tools_and_the_parts_of_the_reward_are_shown():
    one = _one(CALL, END)
    one.turns[1] = replace(one.turns[1], outcome=replace(one.turns[1].outcome, step_reward=-0.05))
    one.tool_rewards = {"gsm8k": 1.0}
    parts = {"rule": 0.5, "tool/gsm8k": 0.25}
    one.score = replace(one.score, value=0.75, parts=parts)
    *_, tools, summary = render_trajectory(one).split("\n")
    assert tools == "  tools   gsm8k: final 1; search: steps -0.05"
    assert summary.startswith("  reward 0.75 = rule 0.5 + tool/gsm8k 0.25, correct, ")


def test_control_characters_are_shown_not_obeyed():
    one = _one(CALL, f"\x1b[2J\r{EOS}", answer=lambda text: "a\x07\x9b\tb")
    lines = render_trajectory(one).split("\n")
    half = render_trajectory(replace(one, turns=[replace(one.turns[0], text="a\ud83db")]))
    assert "  agent | a\\ud83db\n" in half
    assert lines[3] == "  tool  | <result>a\\x07\\x9b\tb</result>"
    assert lines[4].startswith("  agent | \\x1b[2J")
    one.score = replace(one.score, reason="wrong answer: \x1b[2J\nok")
    assert "(wrong answer: \\x1b[2J\\nok), stop eos" in render_trajectory(one)


def test_a_nested_tree_is_drawn_with_its_decisions():
    tree = nested_tree()
    ends = {one.path: summary_line(one) for one in tree.trajectories}
    asked = "H 2 over 8 tokens, baseline 1, dH +1, P 0.7 against 0.5: 1 fork"
    assert render_tree(tree).split("\n") == [
        "question set/0: Q",
        "  truth   1",
        "  4 paths: 3 forks, 0 extra roots",
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


def test_a_turn_that_a_path_leaves_inside_is_drawn_on_both():
    tree = nested_tree()
    root = tree.trajectories[0]
    text = render_tree(part(tree, root, root.turns[-1], root.turns[-1].start + 4, num_new=2))
    assert "| 0.2 agent | part (0, 2)" in text and text.count("= ") >= 5


def test_a_decision_without_forks_or_entropies_is_one_line():
    asked = BranchDecision(
        path=(0,),
        position=40,
        num_slots_left=2,
        baseline_entropy=0.5,
        probe_entropies=(0.25,),
        num_forks=0,
    )
    line = "asked at token 40 with 2 slots: H 0.25 over 1 token, baseline 0.5, dH -0.25: no fork"
    assert decision_line(asked) == line
    bare = decision_line(replace(asked, probe_entropies=()))
    assert bare == "asked at token 40 with 2 slots: no fork"


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
