"""xLAM rows: the ground truth earns the reward, anything else does not."""

import json

import pytest

from mega_agentrl.config.sections.reward import FUNCTION_CALL_SOURCES
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.data.converters.xlam import convert_xlam
from mega_agentrl.reward.function_call import score

TOOLS = [
    {
        "name": "live_giveaways_by_type",
        "description": "Retrieve live giveaways.",
        "parameters": {"type": {"description": "The type.", "type": "str", "default": "game"}},
    }
]
ANSWERS = [
    {"name": "live_giveaways_by_type", "arguments": {"type": "beta"}},
    {"name": "live_giveaways_by_type", "arguments": {"type": "game"}},
]


def rows(*changes):
    base = {
        "id": 0,
        "query": "Where can I find live giveaways for beta access and games?",
        "answers": json.dumps(ANSWERS),
        "tools": json.dumps(TOOLS),
    }
    return [SourceRow("x.json", i, {**base, "id": i, **c}) for i, c in enumerate(changes or ({},))]


def test_a_row_holds_question_functions_and_calls():
    (row,) = convert_xlam(rows(), "xlam-function-calling").rows
    assert row["data_source"] == "xlam-function-calling"
    assert row["data_source"] in FUNCTION_CALL_SOURCES
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert json.dumps(TOOLS[0]) in row["prompt"][0]["content"]
    assert row["prompt"][1]["content"].startswith("Where can I")
    assert row["extra_info"] == {"index": "0", "num_calls": 2}


def test_right_calls_earn_the_reward_and_wrong_ones_do_not():
    (row,) = convert_xlam(rows(), "function_calling").rows
    truth = row["reward_model"]["ground_truth"]
    right = (
        "<think>two</think>[live_giveaways_by_type(type='game'), "
        "live_giveaways_by_type(type='beta')]"
    )
    assert score(right, truth).value == 1.0
    assert score(right.replace("beta", "alpha"), truth).value == 0.0
    assert score("<think>one</think>[live_giveaways_by_type(type='game')]", truth).value == 0.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"answers": "[{"}, "answers"),
        ({"answers": '[{"args": {}}]'}, "answers"),
        ({"answers": '[{"name": "f", "arguments": {"a": NaN}}]'}, "answers"),
        ({"tools": None}, "tools"),
        ({"query": ""}, "query"),
        ({"id": 0}, "id"),
    ],
)
def test_a_bad_row_is_named(change, field):
    with pytest.raises(ValueError, match=rf"x\.json row 1, field {field}: got"):
        convert_xlam(rows({}, change), "function_calling")
