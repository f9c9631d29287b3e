"""The example tool: numbers, step and final rewards, forks."""

from fractions import Fraction

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.tool.gsm8k import NO_IMPROVEMENT_REWARD, Gsm8kTool, parse_answer
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.records import ToolStatus


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("The answer is $1,800.50.", Fraction("1800.5")),
        ("#### -3", -3),
        ("36/2", 18),
        ("1/0", None),
        ("first 3, then 4%", 4),
        ("10-5", 5),
        ("eighteen", None),
        ("", None),
        ("9" * 100_000, None),
    ],
)
def test_the_last_number_of_a_text_counts(text, value):
    assert parse_answer(text) == value


async def session(truth="48 - 30 = 18\n#### 18"):
    made = ToolKit([Gsm8kTool()]).open_session()
    await made.create({"gsm8k": {"create_kwargs": {"ground_truth": truth}}})
    return made


async def test_step_rewards_and_the_last_answer():
    tools = await session()
    for text, fact, reward in (
        ("17", "17 is wrong", NO_IMPROVEMENT_REWARD),
        ("18.0", "18 is right", 0.0),
        ("18", "18 is right", NO_IMPROVEMENT_REWARD),
        ("x", "no number", NO_IMPROVEMENT_REWARD),
    ):
        outcome = await tools.execute("gsm8k", {"answer": text})
        assert fact in outcome.answer and outcome.step_reward == reward
    assert outcome.status is ToolStatus.user_error
    assert await tools.calc_reward() == {"gsm8k": 0.0}


async def test_forks_have_last_answers_of_their_own():
    tools = await session("18")
    assert await tools.calc_reward() == {"gsm8k": 0.0}
    await tools.execute("gsm8k", {"answer": "18"})
    child = await tools.fork()
    await child.execute("gsm8k", {"answer": "19"})
    assert await tools.calc_reward() == {"gsm8k": 1.0}
    assert await child.calc_reward() == {"gsm8k": 0.0}


def test_a_prompt_without_a_truth_is_found_before_the_run():
    for kwargs, got in (({}, None), ({"create_kwargs": {"ground_truth": "many"}}, "many")):
        with pytest.raises(InputError) as caught:
            Gsm8kTool().check_kwargs(kwargs)
        assert caught.value.name.endswith(".ground_truth")
        assert caught.value.got == got
    Gsm8kTool().check_kwargs({"create_kwargs": {"ground_truth": "18"}})
