"""BFCL: files joined by id, one turn and several apart, functions from their files."""

from __future__ import annotations

import json
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.data.converters.bfcl import (
    MAX_ANSWERS,
    NEW_FUNCTIONS_MESSAGE,
    convert_bfcl,
    convert_bfcl_conversations,
    function_schema,
    possible_answers,
)
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.errors import InputError
from mega_agentrl.reward.function_call import score

AREA = {
    "name": "calculate_triangle_area",
    "description": "Calculate the area of a triangle.",
    "parameters": {
        "type": "dict",
        "properties": {"base": {"type": "integer"}, "unit": {"type": "string"}},
        "required": ["base"],
    },
}
SIMPLE = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "Area of a triangle with base 10?"}]],
    "function": [AREA],
}
SIMPLE_ANSWER = {
    "id": "simple_0",
    "ground_truth": [{"calculate_triangle_area": {"base": [10], "unit": ["units", ""]}}],
}
MULTI = {
    "id": "multi_turn_base_3",
    "question": [
        [{"role": "user", "content": "Go to document."}],
        [{"role": "user", "content": "Make temp there."}],
    ],
    "initial_config": {"GorillaFileSystem": {}},
    "path": ["GorillaFileSystem.cd"],
    "involved_classes": ["GorillaFileSystem"],
}
MULTI_ANSWER = {
    "id": "multi_turn_base_3",
    "ground_truth": [["cd('document')"], ["mkdir(name='t')"]],
}
DOCUMENTS = [
    {"name": "cd", "parameters": {"properties": {"folder": {}}}, "response": {}},
    {"name": "mkdir", "parameters": {"properties": {"name": {}}}, "response": {}},
]


def rows(*values, file="q.json"):
    return [SourceRow(file, f"line {number}", value) for number, value in enumerate(values, 1)]


def documents():
    return rows(*DOCUMENTS, file="docs/gorilla_file_system.json")


def test_one_turn_takes_every_possible_answer():
    (row,) = convert_bfcl(rows(SIMPLE) + rows(SIMPLE_ANSWER, file="a.json"), "bfcl").rows
    assert row["data_source"] == "bfcl"
    place = {"index": "simple_0", "category": "simple", "turns": "single_turn", "turn": 0}
    assert row["extra_info"] == place
    assert json.dumps(AREA) in row["prompt"][0]["content"]
    truth = row["reward_model"]["ground_truth"]
    for right in ("base=10", "base=10, unit='units'"):
        assert score(f"</think>[calculate_triangle_area({right})]", truth).value == 1.0
    for wrong in ("base=11", "base=10, unit='cm'", ""):
        assert score(f"</think>[calculate_triangle_area({wrong})]", truth).value == 0.0


def test_several_turns_become_a_row_each_with_the_calls_before():
    source = rows(MULTI) + rows(MULTI_ANSWER, file="a.json") + documents()
    first, second = convert_bfcl(source, "bfcl").rows
    for turn, row in enumerate((first, second)):
        assert row["extra_info"]["turns"] == "multi_turn"
        assert row["extra_info"]["index"] == f"multi_turn_base_3/{turn}"
    assert "response" not in first["prompt"][0]["content"]
    assert first["prompt"][1:] == MULTI["question"][0]
    assert second["prompt"][1:] == [
        MULTI["question"][0][0],
        {"role": "assistant", "content": '[{"name": "cd", "arguments": {"folder": "document"}}]'},
        MULTI["question"][1][0],
    ]
    truth = second["reward_model"]["ground_truth"]
    assert score("</think>[mkdir(name='t')]", truth).value == 1.0
    assert score("</think>[cd(folder='document')]", truth).value == 0.0


def test_a_function_held_back_appears_in_the_turn_that_hands_it_out():
    turns = {"question": [MULTI["question"][0], []], "missed_function": {"1": ["mkdir"]}}
    question = MULTI | turns
    answer = {**MULTI_ANSWER, "ground_truth": [[], ["mkdir(name='t')"]]}
    first, second = convert_bfcl(rows(question) + rows(answer) + documents(), "bfcl").rows
    assert '"mkdir"' not in first["prompt"][0]["content"]
    assert first["reward_model"]["ground_truth"] == ["[]"]
    assert '"mkdir"' in second["prompt"][0]["content"]
    assert second["prompt"][-1] == NEW_FUNCTIONS_MESSAGE


def test_an_excluded_function_is_never_offered():
    question = {**MULTI, "excluded_function": ["mkdir"]}
    for row in convert_bfcl(rows(question) + rows(MULTI_ANSWER) + documents(), "bfcl").rows:
        assert '"mkdir"' not in row["prompt"][0]["content"]


def test_a_conversation_is_one_row_with_its_scenario_turns_and_calls():
    source = rows(SIMPLE | SIMPLE_ANSWER, MULTI) + rows(MULTI_ANSWER, file="a.json") + documents()
    converted = convert_bfcl_conversations(source, "bfcl_multi_turn")
    (row,) = converted.rows
    assert sum(converted.notes.values()) == 1  # the question of one turn
    assert row["prompt"] == MULTI["question"][0]
    assert [one["function"]["name"] for one in json.loads(row["tools"])] == ["cd", "mkdir"]
    extra = row["extra_info"]
    scenario = {
        "initial_config": '{"GorillaFileSystem": {}}',
        "involved_classes": ["GorillaFileSystem"],
        "long_context": False,
    }
    assert extra["tools_kwargs"] == {
        "cd": {"create_kwargs": scenario},
        "mkdir": {"create_kwargs": None},
    }
    assert extra["interaction_kwargs"] == {
        "name": "state_check",
        "turns": ["Make temp there."],
        "ground_truth": MULTI_ANSWER["ground_truth"],
        "excluded_functions": [],
        **scenario,
    }


def test_a_conversation_describes_held_back_functions_where_it_hands_them_out():
    changes = {"question": [MULTI["question"][0], []], "missed_function": {"1": ["mkdir"]}}
    question = MULTI | changes | {"id": "multi_turn_long_context_1"}
    answer = {**MULTI_ANSWER, "id": question["id"]}
    (row,) = convert_bfcl_conversations(rows(question, answer) + documents(), "bfcl").rows
    assert "mkdir" not in row["tools"]
    (text,) = row["extra_info"]["interaction_kwargs"]["turns"]
    assert '"name": "mkdir"' in text and text.endswith(NEW_FUNCTIONS_MESSAGE["content"])
    assert list(row["extra_info"]["tools_kwargs"]) == ["cd", "mkdir"]
    assert row["extra_info"]["interaction_kwargs"]["long_context"]


def test_a_conversation_lacks_excluded_functions():
    question = {**MULTI, "excluded_function": ["cd"]}
    (row,) = convert_bfcl_conversations(rows(question, MULTI_ANSWER) + documents(), "bfcl").rows
    assert list(row["extra_info"]["tools_kwargs"]) == ["mkdir"]
    assert row["extra_info"]["interaction_kwargs"]["excluded_functions"] == ["cd"]


@pytest.mark.parametrize(
    "truth", [[["cd('document')"]], [["cd('document')"], "mkdir()"]], ids=["one_less", "no_list"]
)
def test_a_conversation_with_other_answers_is_refused(truth):
    source = rows(MULTI, MULTI_ANSWER | {"ground_truth": truth}) + documents()
    with pytest.raises(InputError) as caught:
        convert_bfcl_conversations(source, "bfcl")
    assert caught.value.name == "q.json (with q.json line 2) line 1, field ground_truth"
    assert caught.value.got == truth


def test_descriptions_get_the_type_names_of_json_schema():
    nested = {"type": "dict", "properties": {"x": {"type": "float"}, "y": {"type": "any"}}}
    parameters = {"type": "dict", "properties": {"type": {"type": "tuple", "items": nested}}}
    schema = function_schema({"name": "f", "parameters": parameters, "response": {}})
    inner = {"type": "object", "properties": {"x": {"type": "number"}, "y": {}}}
    assert schema["function"] == {
        "name": "f",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"type": {"type": "array", "items": inner}},
        },
    }


def test_irrelevance_wants_no_call_and_relevance_cannot_be_checked():
    questions = [{**SIMPLE, "id": f"live_{kind}_0-0-0"} for kind in ("irrelevance", "relevance")]
    converted = convert_bfcl(rows(*questions), "bfcl")
    (row,) = converted.rows
    assert row["extra_info"]["category"] == "live_irrelevance"
    assert row["reward_model"]["ground_truth"] == ["[]"]
    assert sum(converted.notes.values()) == 1


def test_rows_as_json_text_in_one_file_and_a_plain_question():
    row = {key: json.dumps(value) for key, value in {**SIMPLE, **SIMPLE_ANSWER}.items()}
    row["id"] = "simple_0"
    plain = {"question": "Area?", "function": AREA, "ground_truth": ["calculate_triangle_area(10)"]}
    first, second = convert_bfcl(rows(row, plain), "bfcl").rows
    assert len(first["reward_model"]["ground_truth"]) == 2
    assert second["prompt"][1] == {"role": "user", "content": "Area?"}
    assert json.loads(second["reward_model"]["ground_truth"][0])[0]["arguments"] == {"base": 10}


def test_too_many_possible_answers_are_left_out_and_counted():
    wide = {"f": {f"a{i}": [1, 2] for i in range(20)}}
    converted = convert_bfcl(rows({**SIMPLE, "ground_truth": [wide]}), "bfcl")
    assert converted.rows == []
    assert sum(converted.notes.values()) == 1


@pytest.mark.parametrize(
    ("values", "place"),
    [
        pytest.param([SIMPLE], "line 1, field ground_truth", id="no_answer"),
        pytest.param([SIMPLE_ANSWER], "line 1, field id", id="no_question"),
        pytest.param([SIMPLE, SIMPLE], "line 2, field id", id="twice"),
        pytest.param([MULTI, MULTI_ANSWER], "line 1, field involved_classes", id="no_documents"),
        pytest.param(
            [{**SIMPLE, **SIMPLE_ANSWER, "question": [["hi"]]}], "line 1, field question", id="turn"
        ),
        pytest.param(
            [{**SIMPLE, **SIMPLE_ANSWER, "question": []}], "line 1, field question", id="no_turn"
        ),
        pytest.param(
            [{**SIMPLE, **SIMPLE_ANSWER, "function": ["f"]}], "line 1, field function", id="text"
        ),
        pytest.param(
            [{**MULTI, "function": [], "ground_truth": [["cd()"]]}],
            "line 1, field ground_truth",
            id="number_of_turns",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(values, place):
    with pytest.raises(InputError) as caught:
        convert_bfcl(rows(*values), "bfcl")
    assert caught.value.name.startswith("q.json ")
    assert caught.value.name.endswith(place)


ROW = SourceRow("b.json", "line 1", {})


def arguments(truth):
    answers = possible_answers(truth, {}, ROW)
    return [[call["arguments"] for call in json.loads(answer)] for answer in answers]


def test_answers_have_every_choice_of_every_argument():
    truth = [{"area": {"base": [10], "unit": ["cm", "units", ""]}}]
    assert arguments(truth) == [
        [{"base": 10, "unit": "cm"}],
        [{"base": 10, "unit": "units"}],
        [{"base": 10}],
    ]


def test_objects_list_the_values_of_their_members_also_inside_lists():
    truth = [{"f": {"o": [{"city": ["Rome", "Roma"], "zip": [""]}], "l": [[{"k": [1]}, 2]]}}]
    assert arguments(truth) == [
        [{"o": {"city": "Rome"}, "l": [{"k": 1}, 2]}],
        [{"o": {"city": "Roma"}, "l": [{"k": 1}, 2]}],
    ]


def test_empty_lists_and_functions_without_arguments():
    assert arguments([{"f": {"a": [[]]}}]) == [[{"a": []}]]
    assert possible_answers([{"f": {}}], {}, ROW) == ['[{"name": "f", "arguments": {}}]']
    assert possible_answers([], {}, ROW) == ["[]"]


def test_python_calls():
    truth = ["calc(20, k=5)", "done()"]
    assert possible_answers(truth, {"calc": ["n", "k"]}, ROW) == [
        '[{"name": "calc", "arguments": {"n": 20, "k": 5}}, {"name": "done", "arguments": {}}]'
    ]


@pytest.mark.parametrize(
    "truth", [[{"f": {"a": 1}}], [{"f": {"a": []}}], [{"f": [], "g": []}], [["f()"]], [{"f": 1}]]
)
def test_answers_of_another_form_are_refused(truth):
    with pytest.raises(InputError) as caught:
        possible_answers(truth, {}, ROW)
    assert caught.value.name.startswith("b.json line 1, field ground_truth")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_number_of_answers_is_the_product_of_the_choices(sizes):
    truth = [{"f": {f"a{i}": list(range(size)) for i, size in enumerate(sizes)}}]
    answers = possible_answers(truth, {}, ROW)
    if prod(sizes) > MAX_ANSWERS:
        assert answers is None
    else:
        assert len(set(answers)) == len(answers) == prod(sizes)


def test_far_too_many_answers_are_not_even_counted():
    wide = {f"a{i}": list(range(10)) for i in range(40)}
    assert possible_answers([{"f": wide}], {}, ROW) is None
    assert possible_answers([{"f": {"o": [wide]}}], {}, ROW) is None
    assert possible_answers([{"f": {"a": [1, 2]}}] * 30, {}, ROW) is None
