"""BFCL: files joined by id, one turn and several apart, functions from their files."""

from __future__ import annotations

import json

import pytest

from mega_agentrl.data.converters.bfcl import (
    NEW_FUNCTIONS_MESSAGE,
    convert_bfcl,
    convert_bfcl_conversations,
    expected_calls,
    function_schema,
)
from mega_agentrl.data.converters.function_calls import example_answer
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
    assert first["reward_model"]["ground_truth"] == "[]"
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
    assert row["reward_model"]["ground_truth"] == "[]"
    assert sum(converted.notes.values()) == 1


def test_rows_may_be_json_text_in_one_file_and_questions_plain_text():
    row = {key: json.dumps(value) for key, value in {**SIMPLE, **SIMPLE_ANSWER}.items()}
    row["id"] = "simple_0"
    plain = {"question": "Area?", "function": AREA, "ground_truth": ["calculate_triangle_area(10)"]}
    first, second = convert_bfcl(rows(row, plain), "bfcl").rows
    assert json.loads(first["reward_model"]["ground_truth"])[0]["optional"] == ["unit"]
    assert second["prompt"][1] == {"role": "user", "content": "Area?"}
    assert json.loads(second["reward_model"]["ground_truth"])[0]["arguments"] == {"base": 10}


def test_a_question_with_a_million_accepted_answers_is_kept():
    wide = {"f": {f"a{i}": [1, 2] for i in range(20)}}
    (row,) = convert_bfcl(rows({**SIMPLE, "ground_truth": [wide]}), "bfcl").rows
    accepted = {f"a{i}": [1, 2] for i in range(20)}
    truth = json.loads(row["reward_model"]["ground_truth"])
    assert truth == [{"name": "f", "accepted": accepted, "optional": []}]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"base": []}, id="empty_list_of_values"),
        pytest.param({"base": 10}, id="value_without_a_list"),
        pytest.param({"base": [{"format": "epoch_millis"}]}, id="member_without_a_list"),
        pytest.param({"base": [{"format": []}]}, id="member_with_an_empty_list"),
        pytest.param({"base": [""]}, id="required_number_that_is_only_left_out"),
        pytest.param({"base": [10], "height": [5]}, id="argument_that_the_function_lacks"),
        pytest.param({"unit": ["cm"]}, id="required_argument_without_values"),
        pytest.param([], id="no_arguments"),
    ],
)
def test_a_row_that_nothing_can_satisfy_is_left_out_and_its_file_goes_on(options):
    odd = {**SIMPLE, "id": "odd_0", "ground_truth": [{"calculate_triangle_area": options}]}
    converted = convert_bfcl(rows(odd, SIMPLE | SIMPLE_ANSWER), "bfcl")
    assert [row["extra_info"]["index"] for row in converted.rows] == ["simple_0"]
    ((note, times),) = converted.notes.items()
    assert times == 1 and "q.json line 1, field ground_truth" in note


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


def test_numbers_of_a_java_question_may_be_given_as_source_text():
    question = {**SIMPLE, "id": "simple_java_0", "function": [{"name": "f"}]}
    answer = {"id": "simple_java_0", "ground_truth": [{"f": {"n": [10], "on": [True], "s": ["a"]}}]}
    (row,) = convert_bfcl(rows(question, answer), "bfcl").rows
    truth = row["reward_model"]["ground_truth"]
    for text in ("[f(n='10', on='true', s='a')]", "[f(n=10, on=True, s='a')]"):
        assert score(f"</think>{text}", truth, match="bfcl").correct
    assert not score("</think>[f(n='11', on=True, s='a')]", truth, match="bfcl").correct


ROW = SourceRow("b.json", "line 1", {})


def calls(truth, functions=()):
    return json.loads(expected_calls(truth, functions, ROW))


def test_an_argument_has_one_of_its_values_and_may_be_left_out_where_the_empty_text_is_listed():
    assert calls([{"area": {"base": [10, 10.5], "unit": ["cm", "units", "", "cm"]}}]) == [
        {
            "name": "area",
            "accepted": {"base": [10, 10.5], "unit": ["cm", "units", ""]},
            "optional": ["unit"],
        }
    ]


def function(**types):
    """A function f that requires all parameters whose names do not start with `may`."""
    return {
        "name": "f",
        "parameters": {
            "type": "dict",
            "properties": {name: {"type": kind} for name, kind in types.items()},
            "required": [name for name in types if not name.startswith("may")],
        },
    }


@pytest.mark.parametrize(
    ("kind", "values", "accepted", "can_omit"),
    [
        pytest.param({"place": "string"}, ["Rome", ""], ["Rome", ""], False, id="required_text"),
        pytest.param({"place": "string"}, [""], [""], False, id="required_empty_text"),
        pytest.param({"port": "integer"}, [5432, 80, ""], [5432, 80], False, id="required_number"),
        pytest.param({"may": "string"}, ["Rome", ""], ["Rome", ""], True, id="optional_text"),
        pytest.param({"may": "integer"}, [5, ""], [5], True, id="optional_number"),
        pytest.param({"may": "integer"}, ["port", ""], ["port", ""], True, id="variable_as_text"),
        pytest.param({"may": "array"}, [["a"], ""], [["a"], []], True, id="optional_list"),
        pytest.param({"may": "boolean"}, [True], [True], False, id="must_be_given"),
    ],
)
def test_the_empty_text_means_what_it_means_in_bfcls_checker(kind, values, accepted, can_omit):
    (name,) = kind
    (call,) = calls([{"f": {name: values}}], [function(**kind)])
    if len(accepted) == 1 and not can_omit:
        assert call == {"name": "f", "arguments": {name: accepted[0]}}
    else:
        optional = [name] if can_omit else []
        assert call == {"name": "f", "accepted": {name: accepted}, "optional": optional}


def test_an_optional_number_that_only_the_empty_text_is_listed_for_must_be_left_out():
    assert calls([{"f": {"may": [""], "x": [1]}}], [function(may="integer", x="integer")]) == [
        {"name": "f", "arguments": {"x": 1}}
    ]


def test_objects_list_the_values_of_their_members_also_inside_lists():
    truth = [{"f": {"o": [{"city": ["Rome", "Roma"], "zip": [""]}], "l": [[{"k": [1]}, 2]]}}]
    city = {"accepted": {"city": ["Rome", "Roma"], "zip": [""]}, "optional": ["zip"]}
    assert calls(truth) == [
        {"name": "f", "accepted": {"o": [city], "l": [[{"k": 1}, 2]]}, "optional": []}
    ]


def test_values_below_the_members_of_an_object_are_compared_as_they_are():
    """The form is that of live_multiple_121-46-0 of bfcl-eval 2026.3.23."""
    position = {"lateral": 10.5, "longitudinal": 50}
    truth = [{"f": {"ego_info": [{"position": [position], "orientation": [30]}]}}]
    assert calls(truth) == [
        {"name": "f", "arguments": {"ego_info": {"position": position, "orientation": 30}}}
    ]
    assert calls([{"f": {"position": [position]}}]) == [
        {"name": "f", "arguments": {"position": position}}
    ]


def test_empty_lists_and_functions_without_arguments_are_kept():
    assert calls([{"f": {"a": [[]]}}]) == [{"name": "f", "arguments": {"a": []}}]
    assert calls([{"f": {}}]) == [{"name": "f", "arguments": {}}]
    assert expected_calls([], [], ROW) == "[]"


def test_python_calls_become_calls_with_named_arguments():
    described = [{"name": "calc", "parameters": {"properties": {"n": {}, "k": {}}}}]
    assert calls(["calc(20, k=5)", "done()"], described) == [
        {"name": "calc", "arguments": {"n": 20, "k": 5}},
        {"name": "done", "arguments": {}},
    ]


@pytest.mark.parametrize("truth", [[{"f": [], "g": []}], [["f()"]], [{"f": 1}], ["f("]])
def test_answers_of_another_form_are_refused(truth):
    with pytest.raises(InputError) as caught:
        expected_calls(truth, [], ROW)
    assert caught.value.name.startswith("b.json line 1, field ground_truth")


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        pytest.param("[]", "[]", id="no_call"),
        pytest.param("f(a=1)", "f(a=1)", id="python"),
        pytest.param(
            '[{"name": "f", "accepted": {"a": [[{"accepted": {"k": [1, 2]}, "optional": []}, "é"]],'
            ' "b": ["", 3]}, "optional": ["b"]}]',
            '[{"name": "f", "arguments": {"a": [{"k": 1}, "é"], "b": ""}}]',
            id="first_of_each",
        ),
    ],
)
def test_an_example_of_an_accepted_answer(truth, answer):
    assert example_answer(truth) == answer
