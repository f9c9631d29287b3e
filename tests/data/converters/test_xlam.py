"""xLAM rows: question, functions and expected calls."""

import json

import pytest

from mega_agentrl.config.sections.reward import FUNCTION_CALL_SOURCES
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.data.converters.xlam import convert_xlam
from mega_agentrl.errors import InputError

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
    return [
        SourceRow("x.json", f"row {i}", {**base, "id": i, **c})
        for i, c in enumerate(changes or ({},))
    ]


def test_a_row_holds_question_functions_and_calls():
    (row,) = convert_xlam(rows(), "xlam-function-calling").rows
    assert row["data_source"] == "xlam-function-calling"
    assert row["data_source"] in FUNCTION_CALL_SOURCES
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert json.dumps(TOOLS[0]) in row["prompt"][0]["content"]
    assert row["prompt"][1]["content"].startswith("Where can I")
    assert row["extra_info"] == {"index": "0", "num_calls": 2}
    assert json.loads(row["reward_model"]["ground_truth"]) == ANSWERS
    assert (row["ability"], row["reward_model"]["style"]) == ("function_calling", "rule")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"answers": "[{"}, "answers"),
        ({"answers": '[{"args": {}}]'}, "answers"),
        ({"answers": '[{"name": "f", "arguments": {"a": NaN}}]'}, "answers"),
        ({"tools": None}, "tools"),
        ({"query": ""}, "query"),
    ],
)
def test_a_bad_row_is_named(change, field):
    with pytest.raises(InputError) as caught:
        convert_xlam(rows(change), "function_calling")
    assert caught.value.name == f"x.json row 0, field {field}"
