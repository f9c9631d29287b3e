"""The example tool: numbers, step and final rewards, forks."""

from fractions import Fraction

import pytest

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
def test_numbers(text, value):
    assert parse_answer(text) == value


async def session(truth="48 - 30 = 18\n#### 18"):
    made = ToolKit([Gsm8kTool()]).open_session()
    await made.create({"gsm8k": {"create_kwargs": {"ground_truth": truth}}})
    return made


async def test_steps_and_the_last_answer():
    tools = await session()
    seen = [await tools.execute("gsm8k", {"answer": text}) for text in ("17", "18.0", "18", "x")]
    assert [outcome.step_reward for outcome in seen] == [
        NO_IMPROVEMENT_REWARD,
        0.0,
        NO_IMPROVEMENT_REWARD,
        NO_IMPROVEMENT_REWARD,
    ]
    assert [outcome.answer for outcome in seen] == [
        "The answer 17 is wrong.",
        "The answer 18 is right.",
        "The answer 18 is right.",
        "There is no number in this answer.",
    ]
    assert seen[3].status is ToolStatus.user_error
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
    with pytest.raises(ValueError, match="ground_truth is None, expected a number"):
        Gsm8kTool().check_kwargs({})
    with pytest.raises(ValueError, match="ground_truth is 'many'"):
        Gsm8kTool().check_kwargs({"create_kwargs": {"ground_truth": "many"}})
    Gsm8kTool().check_kwargs({"create_kwargs": {"ground_truth": "18"}})
