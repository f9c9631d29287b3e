"""The rubric reads the rule and the threshold of the configuration."""

import math

import pytest

from mega_agentrl.config.choices import RewardRule
from mega_agentrl.config.schema import RewardConfig
from mega_agentrl.reward.rubric import ArpoRubric, check_tool_weights
from mega_agentrl.types.records import (
    Author,
    Prompt,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)

TEXT = "<think> r </think></search></python><answer> \\boxed{a b} </answer>"


def trajectory():
    prompt = Prompt(prompt_id="p", data_source="d", messages=(), ground_truth="b", token_ids=(1,))
    turn = Turn(index=0, author=Author.assistant, start=0, stop=0, text=TEXT)
    return Trajectory(
        trajectory_id="t",
        prompt=prompt,
        path=(0,),
        token_ids=[],
        loss_mask=[],
        logps=[],
        entropies=[],
        versions=[],
        turn_ids=[],
        turns=[turn],
        stop_reason=StopReason.eos,
    )


def test_rule_and_threshold():
    released = ArpoRubric(RewardConfig(rule=RewardRule.released)).score(trajectory())
    strict = ArpoRubric(RewardConfig(rule=RewardRule.strict)).score(trajectory())
    assert (released.value, strict.value) == (1.1, 1.0)
    assert released.correct


def test_threshold():
    text = TEXT.replace("a b", "c b")
    record = trajectory()
    record.turns = [Turn(index=0, author=Author.assistant, start=0, stop=0, text=text)]
    for rule in RewardRule:
        low = ArpoRubric(RewardConfig(rule=rule, correct_threshold=0.6)).score(record)
        high = ArpoRubric(RewardConfig(rule=rule, correct_threshold=0.7)).score(record)
        assert (low.correct, high.correct) == (True, False)


def called(tool, step_reward):
    outcome = ToolOutcome(
        tool=tool, status=ToolStatus.ok, answer="", latency_s=0.0, step_reward=step_reward
    )
    return Turn(index=0, author=Author.tool, start=0, stop=0, text="", outcome=outcome)


def test_rewards_of_tools_are_parts_of_the_reward():
    record = trajectory()
    record.turns += [called("gsm8k", 0.5), called("gsm8k", -0.25), called("notes", 100.0)]
    record.tool_rewards = {"gsm8k": 1.0}
    alone = ArpoRubric(RewardConfig()).score(record)
    got = ArpoRubric(RewardConfig(tools={"gsm8k": 2.0, "unused": 5.0})).score(record)
    assert alone.value == 1.0 and alone.parts == {}
    assert got.parts == {"rule": 1.0, "tool/gsm8k": 2.5, "tool/unused": 0.0}
    assert got.value == 3.5
    assert (got.correct, got.f1, got.answer) == (alone.correct, alone.f1, alone.answer)


def test_bad_format_keeps_what_the_tools_gave():
    record = trajectory()
    record.turns = [Turn(index=0, author=Author.assistant, start=0, stop=0, text="no tags")]
    record.tool_rewards = {"gsm8k": 1.0}
    assert ArpoRubric(RewardConfig(tools={"gsm8k": 0.5})).score(record).value == -0.5


def test_weights_are_of_tools_that_are_there_and_finite():
    config = RewardConfig(tools={"gsm9k": 0.5})
    with pytest.raises(ValueError, match=r"reward\.tools\.gsm9k=0\.5: .* one of python, gsm8k"):
        check_tool_weights(config, ("python", "gsm8k"))
    check_tool_weights(RewardConfig(tools={"gsm8k": 0.5}), ("python", "gsm8k"))
    with pytest.raises(ValueError, match=r"reward\.tools\.a=nan: expected a finite number"):
        RewardConfig(tools={"a": math.nan})
