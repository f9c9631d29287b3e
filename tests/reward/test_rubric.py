"""The rubric reads the rule and the threshold of the configuration."""

from mega_agentrl.config.choices import RewardRule
from mega_agentrl.config.schema import RewardConfig
from mega_agentrl.reward.rubric import ArpoRubric
from mega_agentrl.types.records import Author, Prompt, StopReason, Trajectory, Turn

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
