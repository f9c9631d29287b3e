"""Trajectories as text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.io.render import render_trajectory
from mega_agentrl.types.records import ToolStatus
from tests.fakes import EOS, CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt, turns


def _one(*texts, **tools):
    (tree,) = asyncio.run(
        collect_rollouts(
            [make_prompt("set/7", question="how?", token_ids=(63,))],
            generator=FakeGenerator(turns(*texts)),
            tools=FakeTools(**tools),
            codec=CharCodec(),
            rubric=FakeRubric(),
            config=RolloutConfig(group_size=1),
            max_model_len=4096,
            seed=1,
            step=0,
        )
    )
    return tree.trajectories[0]


def test_question_turns_and_score():
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
    one = _one("<search>q1</search>", status=lambda text: ToolStatus.infra_error)
    lines = render_trajectory(one).split("\n")
    assert lines[-2] == "  tool  | (infra_error, not shown to the agent) ok:q1"
    assert lines[-1].strip().startswith("failed, not scored, stop tool_failure, 19 tokens")


def test_a_fork_names_its_parent():
    one = _one(f"<answer>1</answer>{EOS}")
    one.path, one.parent_id, one.fork_len = (0, 1, 0), "x", 4
    assert render_trajectory(one).endswith("forked at token 4 of 0.1")


def test_rewards_of_tools_and_the_parts_of_the_reward():
    one = _one("<search>q1</search>", f"<answer>1</answer>{EOS}")
    one.turns[1] = replace(one.turns[1], outcome=replace(one.turns[1].outcome, step_reward=-0.05))
    one.tool_rewards = {"gsm8k": 1.0}
    parts = {"rule": 0.5, "tool/gsm8k": 0.25}
    one.score = replace(one.score, value=0.75, parts=parts)
    *_, tools, summary = render_trajectory(one).split("\n")
    assert tools == "  tools   gsm8k: final 1; search: steps -0.05"
    assert summary.startswith("  reward 0.75 = rule 0.5 + tool/gsm8k 0.25, correct, ")


def test_control_characters_are_shown_not_obeyed():
    one = _one("<search>q1</search>", f"\x1b[2J\r{EOS}", answer=lambda text: "a\x07\x9b\tb")
    lines = render_trajectory(one).split("\n")
    half = render_trajectory(replace(one, turns=[replace(one.turns[0], text="a\ud83db")]))
    assert "  agent | a\\ud83db\n" in half
    assert lines[3] == "  tool  | <result>a\\x07\\x9b\tb</result>"
    assert lines[4].startswith("  agent | \\x1b[2J")
    one.score = replace(one.score, reason="wrong answer: \x1b[2J\nok")
    assert "(wrong answer: \\x1b[2J\\nok), stop eos" in render_trajectory(one)
