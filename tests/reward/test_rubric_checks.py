"""Rubrics that do not fit the run or its data are named before anything starts."""

import pytest

from mega_agentrl.config.enums import FunctionCallMatch
from mega_agentrl.config.sections.reward import RewardConfig
from mega_agentrl.reward.rubric_checks import check_prompt_rubrics, check_rubric_parts
from tests.fakes import make_prompt

NAMES = ("python", "gsm8k")


def config(weights, source="default", **changes):
    return RewardConfig(rubric={source: weights}, **changes)


def test_parts_are_built_in_or_the_runs_own():
    check_rubric_parts(config({"arpo": 1.0, "gsm8k": 0.5}), NAMES)
    check_rubric_parts(config({"mine": 1.0}, functions={"mine": "m:f"}), NAMES)
    with pytest.raises(ValueError, match=r"rubric\.default\.gsm9k=0\.5: .* one of gsm8k; probable"):
        check_rubric_parts(config({"gsm9k": 0.5}), NAMES)
    with pytest.raises(ValueError, match="expected one of accuracy;"):
        check_rubric_parts(config({"accurracy": 0.5}), NAMES)
    with pytest.raises(ValueError, match=r"one of arpo, arpo_released, .*, model, python, gsm8k;"):
        check_rubric_parts(config({"zzz": 0.5}), NAMES)


def test_a_name_means_one_part():
    with pytest.raises(ValueError, match="the part accuracy is a tool's or a user's name and"):
        check_rubric_parts(config({"accuracy": 1.0}), ("accuracy",))
    check_rubric_parts(config({"arpo": 1.0}), ("accuracy",))


def test_every_prompt_has_a_rubric():
    prompts = [make_prompt("a/1", data_source="math"), make_prompt("b/1", data_source="qa")]
    check_prompt_rubrics(config({"arpo": 1.0}), prompts)
    only = config({"arpo": 1.0}, "math")
    check_prompt_rubrics(only, prompts[:1])
    with pytest.raises(ValueError, match=r"prompt b/1: .* its data source qa nor default"):
        check_prompt_rubrics(only, prompts)


def test_what_a_part_reads_of_a_prompt():
    calls = make_prompt("p", ground_truth="no calls here")
    with pytest.raises(ValueError, match="prompt p: ground_truth: got 'no calls here'"):
        check_prompt_rubrics(config({"function_call": 1.0}), [calls])
    check_prompt_rubrics(
        config({"function_call": 1.0}, function_call_match=FunctionCallMatch.string), [calls]
    )
    check_prompt_rubrics(config({"arpo": 1.0}), [calls])
    odd = make_prompt("p", extra_info={"when": object()})
    with pytest.raises(ValueError, match="prompt p: extra_info: a value of type object"):
        check_prompt_rubrics(config({"mine": 1.0}, functions={"mine": "m:f"}), [odd])
    check_prompt_rubrics(config({"arpo": 1.0}), [odd])
