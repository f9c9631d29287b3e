"""The rubric: parts by data source, their weighted sum, futures, late model scores, and checks."""

from __future__ import annotations

import math
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import FunctionCallMatch
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.reward import (
    BUILT_IN_PARTS,
    MODEL_PART,
    RewardConfig,
    RewardModelConfig,
)
from mega_agentrl.errors import InputError
from mega_agentrl.reward.registry import REWARDS
from mega_agentrl.reward.rubric import (
    MAX_PART,
    WeightedRubric,
    check_prompt_rubrics,
    check_rubric_parts,
    gather_futures,
)
from mega_agentrl.reward.user_reward import UserRewardError, UserRewardResult
from mega_agentrl.rollout.groups.scoring import PendingScore
from mega_agentrl.rollout.metrics.failures import count_failures
from mega_agentrl.rollout.metrics.rollout import reward_metrics
from mega_agentrl.types.errors import RewardError
from mega_agentrl.types.records import Role, RolloutTree, Turn
from tests.fakes import OUTCOME, make_prompt, make_trajectory

TEXT = "<think> r </think></search></python><answer> \\boxed{a b} </answer>"
CALLS = '<think> r </think>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'


def trajectory(text=TEXT, source="d", truth="b", **prompt):
    return make_trajectory(
        prompt=make_prompt(data_source=source, ground_truth=truth, **prompt),
        turns=[Turn(index=0, role=Role.assistant, start=0, stop=0, text=text)],
    )


def called(tool, step_reward=0.0, text=""):
    outcome = replace(OUTCOME, tool=tool, step_reward=step_reward)
    return Turn(index=0, role=Role.tool, start=0, stop=0, text=text, outcome=outcome)


def rubric(parts=None, *, functions=None, judge=None, **changes):
    """One rubric for every data source, or by data source."""
    by_source = parts or {"arpo": 1.0}
    if not isinstance(next(iter(by_source.values())), dict):
        by_source = {"default": by_source}
    return WeightedRubric(RewardConfig(rubric=by_source, **changes), functions, judge)


class PendingScorer:
    """Stands for a user function behind its pool, or for a judge."""

    def __init__(self):
        self.calls, self.future = [], Future()

    def submit(self, *arguments, **values):
        self.calls.append(arguments or values)
        return self.future


def test_the_registered_parts_are_the_built_in_ones():
    assert {*REWARDS, MODEL_PART} == set(BUILT_IN_PARTS)


def test_each_built_in_part_scores_by_its_rule():
    record = trajectory()
    assert rubric().score(record).value == 1.0
    assert rubric({"arpo_released": 1.0}).score(record).value == 1.1
    assert rubric({"accuracy": 1.0}).score(record).value == 0.0
    assert rubric({"accuracy": 1.0}).score(trajectory("so \\boxed{12.0}", truth="12")).value == 1.0
    swapped = '[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"x": 1}}]'
    calls = trajectory(CALLS, truth=swapped)
    for match in FunctionCallMatch:
        got = rubric({"function_call": 1.0}, function_call_match=match).score(calls)
        assert got.value == (match in (FunctionCallMatch.ast, FunctionCallMatch.bfcl))


def test_an_answer_of_a_tool_is_no_answer_of_the_policy():
    record = trajectory("I do not know", truth="12")
    record.turns.append(called("search", text="<result> \\boxed{12} </result>"))
    assert not rubric({"accuracy": 1.0}).score(record).correct


def test_an_answer_is_correct_from_the_threshold_on():
    record = trajectory(TEXT.replace("a b", "c b"))
    for part in ("arpo", "arpo_released"):
        low = rubric({part: 1.0}, correct_threshold=0.6).score(record)
        high = rubric({part: 1.0}, correct_threshold=0.7).score(record)
        assert (low.correct, high.correct) == (True, False)


def test_a_data_source_has_its_own_parts():
    by_source = {"math": {"accuracy": 2.0}, "default": {"arpo": 1.0}}
    assert rubric(by_source).score(trajectory("\\boxed{b}", "math")).value == 2.0
    assert rubric(by_source).score(trajectory("\\boxed{b}", "other")).value == -1.0


def test_rewards_of_tools_are_parts_of_the_reward():
    record = trajectory()
    record.turns += [called("gsm8k", 0.5), called("gsm8k", -0.25), called("notes", 100.0)]
    record.tool_rewards = {"gsm8k": 1.0}
    alone = rubric().score(record)
    got = rubric({"arpo": 1.0, "gsm8k": 2.0, "unused": 5.0}).score(record)
    assert alone.value == 1.0 and alone.parts == {}
    assert got.parts == {"arpo": 1.0, "gsm8k": 2.5, "unused": 0.0}
    assert got.value == 3.5
    assert (got.correct, got.f1, got.answer) == (alone.correct, alone.f1, alone.answer)


def test_the_first_part_decides_what_is_correct():
    record = trajectory("no tags")
    record.tool_rewards = {"gsm8k": 1.0}
    assert rubric({"arpo": 1.0, "gsm8k": 0.5}).score(record).value == -0.5
    assert not rubric({"arpo": 1.0, "gsm8k": 0.5}).score(record).correct
    tool_first = rubric({"gsm8k": 0.5, "arpo": 1.0}).score(record)
    assert (tool_first.value, tool_first.correct, tool_first.f1) == (-0.5, True, 1.0)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(-10, 10), min_size=1),
    st.floats(-4, 4),
    st.data(),
)
def test_parts_add_up_and_weights_are_linear(weights, factor, data):
    record = trajectory()
    record.tool_rewards = {name: data.draw(st.floats(-5, 5)) for name in "abcdef"}
    got = rubric(weights).score(record)
    scaled = rubric({name: factor * weight for name, weight in weights.items()}).score(record)
    assert scaled.value == pytest.approx(factor * got.value, abs=1e-9)
    if len(weights) > 1:
        assert sum(got.parts.values()) == pytest.approx(got.value, abs=1e-12)
        assert list(got.parts) == list(weights)
    else:
        assert got.parts == {}


def test_a_user_function_is_called_and_its_fields_are_kept():
    mine = PendingScorer()
    parts = {"arpo": 1.0, "mine": 0.5}
    record = trajectory(extra_info={"index": 3})
    record.turns.append(called("search", text=" page"))
    future = rubric(parts, functions={"mine": mine}).score(record)
    assert not future.done()
    ((values,),) = mine.calls
    assert values["solution_str"] == TEXT + " page"
    assert (values["data_source"], values["ground_truth"]) == ("d", "b")
    tools = {"search": 0.0}
    assert values["extra_info"] == {"index": 3, "num_turns": 3, "rollout_reward_scores": tools}
    assert (values["num_turns"], values["stop_reason"], values["tool_rewards"]) == (3, "eos", tools)
    assert [message["role"] for message in values["messages"][-2:]] == ["assistant", "tool"]
    mine.future.set_result(UserRewardResult(value=3.0, fields={"steps": 2, "why": "good"}))
    got = future.result(0)
    assert got.parts == {"arpo": 1.0, "mine": 1.5} and got.value == 2.5
    assert got.extra_info == {"mine": {"steps": 2, "why": "good"}}
    assert got.correct and got.answer == "a b"


@pytest.mark.parametrize("value", [1e308, -1e308, 2 * MAX_PART, math.inf, -math.inf, math.nan])
def test_no_part_is_larger_than_the_bound_whoever_computes_it(value):
    """Tools, simulated users, environments, agents and state checks all write `tool_rewards`."""
    of_steps, at_the_end = trajectory(), trajectory()
    of_steps.turns.append(called("game", value))
    at_the_end.tool_rewards = {"game": value}
    for record in (of_steps, at_the_end):
        assert isinstance(
            score_error(rubric({"arpo": 1.0, "game": 0.0}).score(record)), RewardError
        )
        assert rubric().score(record).value == 1.0, "what is no part does not matter"
    mine = PendingScorer()
    future = rubric({"mine": 1.0}, functions={"mine": mine}).score(trajectory())
    mine.future.set_result(UserRewardResult(value=value))
    assert isinstance(score_error(future), RewardError)
    judge = PendingScorer()
    config = RewardModelConfig("http://127.0.0.1/v1", "judge")
    future = rubric({MODEL_PART: 1.0}, judge=judge, model=config).score(trajectory())
    judge.future.set_result(value)
    assert isinstance(score_error(future), RewardError)


def test_a_part_at_the_bound_is_a_reward():
    record = trajectory()
    record.tool_rewards = {"game": -MAX_PART}
    assert rubric({"game": 0.5}).score(record).value == -0.5 * MAX_PART


@pytest.mark.parametrize("value", [2 * MAX_PART, math.nan])
def test_a_model_in_a_folder_has_the_same_bound(value):
    model = RewardModelConfig("/folder")
    weighted = rubric({"arpo": 1.0, MODEL_PART: 1.0}, model=model)
    record = trajectory()
    record.score = weighted.score(record)
    with pytest.raises(RewardError):
        weighted.add_model_score(record, value)


def score_error(score):
    """The error of a score that could not be computed."""
    assert isinstance(score, Future)
    return score.exception(0)


def test_a_user_function_alone_is_the_reward():
    mine = PendingScorer()
    weighted = rubric({"mine": 2.0}, functions={"mine": mine}, correct_threshold=0.5)
    future = weighted.score(trajectory())
    mine.future.set_result(UserRewardResult(value=0.5))
    got = future.result(0)
    assert (got.value, got.correct, got.f1, got.parts) == (1.0, True, 1.0, {})


def test_a_function_that_fails_leaves_no_reward():
    mine = PendingScorer()
    future = rubric({"arpo": 1.0, "mine": 0.5}, functions={"mine": mine}).score(trajectory())
    mine.future.set_exception(UserRewardError("it hung"))
    assert str(future.exception(0)) == "it hung"


def test_parts_without_a_score_are_left_out():
    mine = PendingScorer()
    weighted = rubric({"mine": 2.0, "arpo": 0.5}, functions={"mine": mine})
    future = weighted.score(trajectory())
    mine.future.set_result(UserRewardResult(value=None))
    got = future.result(0)
    assert (got.value, got.parts, got.correct) == (0.5, {"arpo": 0.5}, True)


def test_no_part_with_a_score_leaves_the_trajectory_out_of_its_group_without_a_failure():
    mine = PendingScorer()
    record = trajectory()
    future = rubric({"mine": 1.0}, functions={"mine": mine}).score(record)
    mine.future.set_result(UserRewardResult(value=None))
    PendingScore(trajectory=record, future=future).resolve()
    assert record.reward_abstained and record.failed and record.score is None
    other = trajectory()
    other.score = rubric().score(other)
    counts = count_failures([RolloutTree(prompt=record.prompt, trajectories=[record, other])])
    assert (counts.num_failed, counts.num_abstained, counts.num_scored) == (0, 1, 1)
    metrics = reward_metrics([record, other])
    assert metrics["reward/failed_fraction"] == 0 and metrics["reward/abstained_fraction"] == 0.5


def test_metrics_average_what_is_there_and_are_finite():
    records = []
    for fields in ({"x": 1}, {"x": math.nan}, {"x": 3.0, "y": None}, {"x": "text"}):
        one = trajectory()
        one.score = replace(rubric().score(one), extra_info={"mine": fields})
        records.append(one)
    metrics = reward_metrics(records)
    assert metrics["reward/mine/x"] == 2.0 and "reward/mine/y" not in metrics


def test_expressions_are_futures_of_the_rubric():
    got = rubric({"accuracy": 2.0}).score(trajectory("\\boxed{x+1}", truth="1+x"))
    assert got.result(300).value == 2.0


@pytest.mark.parametrize("part", ["arpo", "arpo_released", "accuracy"])
def test_numbers_and_search_r1s_targets_are_answers_and_no_answer_is_refused(part):
    for truth in (34, 2.5, {"target": ["Paris", "City of Paris"]}, ["1", 2]):
        check_prompt_rubrics(config({part: 1.0}), [make_prompt("p", ground_truth=truth)])
    for truth in (None, "", [], {"other": 1}):
        with pytest.raises(InputError) as caught:
            check_prompt_rubrics(config({part: 1.0}), [make_prompt("p", ground_truth=truth)])
        assert caught.value.name == "prompt p, ground_truth"
        mine = config({"mine": 1.0}, functions={"mine": "m:f"})
        check_prompt_rubrics(mine, [make_prompt("p", ground_truth=truth)])


def test_a_judge_reads_the_trajectory():
    judge = PendingScorer()
    judge_config = RewardModelConfig(path_or_url="http://here/v1", served_model_name="judge")
    weighted = rubric({"model": 0.5, "arpo": 1.0}, judge=judge, model=judge_config)
    record = trajectory()
    record.turns.append(called("search", text=" page"))
    assert not weighted.needs_reward_model(record.prompt)
    future = weighted.score(record)
    assert judge.calls == [(record,)]
    judge.future.set_result(0.8)
    got = future.result(0)
    assert got.parts == {"model": pytest.approx(0.4), "arpo": 1.0}
    assert not got.correct and got.reason == "the judge gave 0.8"


@pytest.mark.parametrize("first", ["model", "arpo"])
def test_a_model_in_a_folder_is_added_afterwards(first):
    weights = {first: 0.0} | {"model": 0.5, "arpo": 1.0}
    by_source = {"judged": weights, "default": {"arpo": 1.0}}
    weighted = rubric(by_source, model=RewardModelConfig("folder"))
    record = trajectory(source="judged")
    assert weighted.needs_reward_model(record.prompt)
    assert not weighted.needs_reward_model(trajectory().prompt)
    record.score = replace(weighted.score(record), extra_info={"mine": {"a": 1}})
    assert record.score.value == 1.0
    assert record.score.correct == (first == "arpo")
    got = weighted.add_model_score(record, 3.0)
    assert list(got.parts) == list(weights)
    assert got.parts == {"model": 1.5, "arpo": 1.0} and got.value == 2.5
    assert got.correct and got.extra_info == {"mine": {"a": 1}}
    assert got.answer == ("" if first == "model" else "a b")


def test_a_model_alone_is_the_reward():
    weighted = rubric({"model": -2.0}, model=RewardModelConfig("folder"))
    record = trajectory()
    record.score = weighted.score(record)
    assert record.score.value == 0.0
    got = weighted.add_model_score(record, 0.5)
    assert (got.value, got.parts, got.correct) == (-1.0, {}, False)


NAMES = ("python", "gsm8k")


def config(weights, source="default", **changes):
    return RewardConfig(rubric={source: weights}, **changes)


def test_unknown_parts_are_refused_with_similar_ones():
    check_rubric_parts(config({"arpo": 1.0, "gsm8k": 0.5}), NAMES)
    check_rubric_parts(config({"mine": 1.0}, functions={"mine": "m:f"}), NAMES)
    for name, near in (("gsm9k", "gsm8k"), ("accurracy", "accuracy"), ("zzz", "arpo")):
        with pytest.raises(ConfigError) as caught:
            check_rubric_parts(config({name: 0.5}), NAMES)
        assert (caught.value.key, caught.value.got) == (f"reward.rubric.default.{name}", 0.5)
        assert near in caught.value.expected


def test_a_name_of_two_parts_is_refused():
    with pytest.raises(ConfigError) as caught:
        check_rubric_parts(config({"accuracy": 1.0}), ("accuracy",))
    assert (caught.value.key, caught.value.got) == ("reward.rubric", "accuracy")
    check_rubric_parts(config({"arpo": 1.0}), ("accuracy",))


def test_every_prompt_has_a_rubric():
    prompts = [make_prompt("a/1", data_source="math"), make_prompt("b/1", data_source="qa")]
    check_prompt_rubrics(config({"arpo": 1.0}), prompts)
    only = config({"arpo": 1.0}, "math")
    check_prompt_rubrics(only, prompts[:1])
    with pytest.raises(InputError) as caught:
        check_prompt_rubrics(only, prompts)
    assert (caught.value.name, caught.value.got) == ("prompt b/1, data source", "qa")


def test_a_data_source_that_asks_for_another_format_than_arpo_reads_is_named(caplog):
    def prompt(source, text):
        return make_prompt(data_source=source, messages=({"role": "user", "content": text},))

    last_line = "The last line of your response should be of the form Answer: $Answer"
    prompts = [prompt("tags", "2+2?"), prompt("tags", "in <answer> </answer>")]
    prompts += [
        prompt("math", last_line),
        prompt("math", last_line),
        prompt("math_dapo", last_line),
    ]
    check_prompt_rubrics(RewardConfig(), prompts)
    (line,) = caplog.records
    assert "+reward.rubric.math={accuracy:1}" in line.message


def test_answers_of_dapo_are_read_by_default():
    record = trajectory("2+2 is 4.\nAnswer: $4$", source="math_dapo", truth="4")
    assert WeightedRubric(RewardConfig()).score(record).value == 1.0


def test_a_prompt_that_a_part_cannot_read_is_refused():
    calls = make_prompt("p", ground_truth="no calls here")
    with pytest.raises(InputError) as caught:
        check_prompt_rubrics(config({"function_call": 1.0}), [calls])
    assert caught.value.name == "prompt p, ground_truth"
    assert caught.value.got == "no calls here"
    check_prompt_rubrics(
        config({"function_call": 1.0}, function_call_match=FunctionCallMatch.string), [calls]
    )
    check_prompt_rubrics(config({"arpo": 1.0}), [calls])
    odd = make_prompt("p", extra_info={"when": object()})
    with pytest.raises(InputError) as caught:
        check_prompt_rubrics(config({"mine": 1.0}, functions={"mine": "m:f"}), [odd])
    assert caught.value.name == "prompt p, extra_info"
    check_prompt_rubrics(config({"arpo": 1.0}), [odd])


@given(st.permutations(range(4)))
def test_results_are_gathered_in_any_order(order):
    parts = {str(index): Future() for index in range(4)}
    whole = gather_futures(parts, lambda came: [came[name] for name in parts])
    for place, index in enumerate(order):
        assert not whole.done(), place
        parts[str(index)].set_result(index * 10)
    assert whole.result(0) == [0, 10, 20, 30]


def test_finished_futures_are_gathered_at_once():
    done = Future()
    done.set_result(3)
    assert gather_futures({"a": done}, lambda came: came["a"] + 1).result(0) == 4


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_first_error_is_the_result(order):
    parts = {str(index): Future() for index in range(3)}
    whole = gather_futures(parts, dict)
    settle = [
        lambda: parts["0"].set_exception(KeyError("zero")),
        lambda: parts["1"].set_result(1),
        lambda: parts["2"].set_exception(OSError("two")),
    ]
    for index in order:
        settle[index]()
    expected = KeyError if order.index(0) < order.index(2) else OSError
    assert isinstance(whole.exception(0), expected)


def test_cancelling_reaches_the_parts():
    parts = {"a": Future(), "b": Future()}
    whole = gather_futures(parts, dict)
    assert whole.cancel()
    assert parts["a"].cancelled() and parts["b"].cancelled()


def test_a_part_that_is_cancelled_and_a_bug_are_errors():
    parts = {"a": Future(), "b": Future()}
    whole = gather_futures(parts, dict)
    parts["a"].cancel()
    assert isinstance(whole.exception(0), CancelledError)
    done = Future()
    done.set_result(0)
    failed = gather_futures({"a": done}, lambda came: 1 / 0)
    assert isinstance(failed.exception(0), ZeroDivisionError)
