"""The list of sources: the reward for calls knows all that hold calls."""

import pytest

from mega_agentrl.config.sections.reward import FUNCTION_CALL_SOURCES
from mega_agentrl.data.converters.registry import SOURCES, convert_rows
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.errors import InputError


def test_sources_with_calls_are_those_of_the_reward():
    with_calls = {name for name, source in SOURCES.items() if source.has_calls}
    assert with_calls == set(FUNCTION_CALL_SOURCES)


def test_the_source_names_its_rows():
    row = SourceRow("g.jsonl", "line 1", {"question": "1+1?", "answer": "#### 2"})
    (made,) = convert_rows("gsm8k", [row]).rows
    assert made["data_source"] == "gsm8k"


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError) as caught:
        convert_rows("gsm9k", [])
    assert (caught.value.name, caught.value.got) == ("--source", "gsm9k")


@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_another_data_set_are_refused(source):
    row = SourceRow("w.jsonl", "line 1", {"text": "once"})
    with pytest.raises(InputError) as caught:
        convert_rows(source, [row])
    assert caught.value.name.startswith("w.jsonl line 1, field ")


MESSAGES = [{"role": "user", "content": "?"}]
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
FUNCTION = {"name": "f", "parameters": {"properties": {"a": {}}}}
SOUND = [
    ("function_calling", {"id": 1, "query": "?", "tools": [FUNCTION], "answers": [{"name": "f"}]}),
    (
        "bfcl",
        {
            "id": "simple_1",
            "question": [MESSAGES],
            "function": [FUNCTION],
            "ground_truth": [{"f": {"a": [1, {"b": [2]}]}}],
        },
    ),
    (
        "bfcl",
        {
            "id": "multi_1",
            "question": [MESSAGES, []],
            "involved_classes": ["docs"],
            "excluded_function": ["g"],
            "missed_function": {"1": ["f"]},
            "ground_truth": [["f(1)"], []],
        },
    ),
    ("open_agentic_tool_use", {"messages": [*MESSAGES, CALLING], "tools": [FUNCTION]}),
    ("search_r1", {"question": "?", "golden_answers": ["a"], "data_source": "nq"}),
    ("search_r1", {"question": "?", "reward_model": {"ground_truth": {"target": ["a"]}}}),
    ("gsm8k", {"question": "?", "answer": "#### 1"}),
    (
        "arpo",
        {
            "prompt": MESSAGES,
            "reward_model": {"ground_truth": "a"},
            "data_source": "s",
            "extra_info": {"index": 1, "tools_kwargs": {"search": {"create_kwargs": None}}},
        },
    ),
    ("geometry3k", {"problem": "?", "images": [{"bytes": b"x", "path": "a"}], "answer": "1"}),
    ("chartqa", {"query": "?", "image": {"path": "a.png"}, "label": ["1"]}),
    ("virl39k", {"qid": "q", "question": "<image>?", "image": ["a.png"], "answer": "1"}),
]
JUNK = (None, 1, 1.5, True, "", "x", "[1]", "{}", "f(a={[]})", [], {}, [1], [None], [[]], [{}])


def damaged(value):
    """Copies of the value, in each of which one part, or the whole, is something else."""
    yield from JUNK
    if isinstance(value, dict):
        for name, inner in value.items():
            yield {key: item for key, item in value.items() if key != name}
            yield from ({**value, name: other} for other in damaged(inner))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in damaged(inner))


def converted(source, values):
    rows = [SourceRow("j.jsonl", "line 1", values)]
    if "involved_classes" in values:
        rows.append(SourceRow("docs.json", "line 1", FUNCTION))
    return convert_rows(source, rows).rows


@pytest.mark.parametrize(("source", "values"), SOUND)
def test_every_damaged_row_is_converted_or_refused_by_name(source, values):
    assert converted(source, values)
    num_refused = 0
    for bad in damaged(values):
        if not isinstance(bad, dict):
            continue
        try:
            converted(source, bad)
        except ValueError as error:
            num_refused += 1
            assert "j.jsonl" in str(error) or "docs.json" in str(error)
    assert num_refused > 20
