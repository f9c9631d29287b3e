"""Converts BFCL questions of one or several turns; `extra_info.turns` says which.

`convert_bfcl` makes rows for the reward `function_call`, `convert_bfcl_conversations` whole
conversations for the simulated user `rollout.interaction.state_check`.

A row has `id`, `question` (turns, each a list of messages; a text in v1), `function` and
`ground_truth`. The leaderboard ships these in several files, and rows with the same `id` are
joined: pass the question files and their `possible_answer` files together. Rows of several turns
have `involved_classes` instead of `function`: also pass the files of `multi_turn_func_doc` under
their original names.

A single-turn question becomes one RL row, `turns=single_turn`, whose ground truth says what is
accepted. A multi-turn question becomes one RL row per turn, `turns=multi_turn`, index `id/turn`:
the prompt holds the earlier turns with the calls expected there, and the ground truth is this
turn's calls. The results of those calls are not in the data, so the prompt lacks them, and BFCL's
own check of the resulting state is not done here, but in conversations. In a turn without a
message, BFCL offers a function that it held back before (`missed_function`).

BFCL gives a list of accepted values for every argument. The ground truth has the same in the form
of `types.ground_truth`, or the calls themselves if there is one choice only:

    [{"area": {"base": [10], "unit": ["cm", ""]}}]
    [{"name": "area", "accepted": {"base": [10], "unit": ["cm", ""]}, "optional": ["unit"]}]

The empty text among the values means what it means in BFCL's checker: the argument may be left out,
unless the function requires it, and the empty text itself is right where a text is expected. An
object lists the accepted values of its members in the same way, also inside of a list; values below
that are compared as they are. A question that no answer can satisfy, such as one with an empty list
of values, is malformed.

BFCL's own checker is more lenient with texts (it ignores case, spaces and some punctuation) and
stricter with numbers given as texts: `reward.function_call_match=bfcl` compares as it does. Answers
to its questions in Java and JavaScript give numbers and booleans as source text, which is accepted
beside them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_agentrl.data.converters.function_calls import (
    example_answer,
    format_calls_json,
    make_system_message,
    parameter_names,
    parameter_schemas,
    parse_python_call,
)
from mega_agentrl.data.converters.source_row import (
    ConversionResult,
    SourceRow,
    convert_each,
    make_rl_row,
)
from mega_agentrl.types.records import Message

SINGLE_TURN, MULTI_TURN = "single_turn", "multi_turn"
NEW_FUNCTIONS_MESSAGE: Message = {
    "role": "user",
    "content": "I have updated some more functions you can choose from. What about now?",
}
FUNCTION_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""Name of the file that describes the functions of each class."""
_TEXT_TYPES = ("string", "String", "char", "any", "Any")
"""Types whose arguments BFCL's checker compares as texts."""
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
_OTHER_ANSWERS = "the answers of another version of BFCL"
_NOTE_ONE_TURN = "left out: a question of one turn (--source bfcl converts it)"
_NOTE_UNKNOWN_CALLS = "left out: a call is expected, but the data does not say which"

_TurnRows = list[tuple[str, list[Message], str, dict[str, Any]]]


def convert_bfcl(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert all questions (`convert_each`).

    Raises:
        ValueError: A file was given twice, or without the file of its questions.
    """
    questions, documents = _join_by_id(rows)
    notes: Counter[str] = Counter()

    def convert(row: SourceRow, _: int) -> list[dict[str, Any]]:
        category = _category(row)
        turns = _parse_turns(row)
        truth = _expected_calls(row, category)
        if truth is not None and "java" in category:
            truth = [_with_source_texts(call) for call in truth]
        if truth is None:
            notes[_NOTE_UNKNOWN_CALLS] += 1
            return []
        functions = _available_functions(row, documents)
        has_turns = len(turns) > 1 or any(isinstance(item, list) for item in truth)
        if has_turns:
            _check_turns(row, turns, truth)
        turn_rows = (
            _multi_turn_rows(row, turns, truth, functions)
            if has_turns
            else _single_turn_rows(row, turns[0], truth, functions)
        )
        return [
            make_rl_row(
                data_source=data_source,
                messages=messages,
                ground_truth=answers,
                ability="function_calling",
                extra_info={"index": index, "category": category, **extra},
            )
            for index, messages, answers, extra in turn_rows
        ]

    return convert_each(questions, convert, notes)


def convert_bfcl_conversations(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert each question of several turns to one row; other questions are left out.

    The prompt is the first turn. `tools_kwargs` name the functions, and the first of them has the
    initial configuration of the classes; `interaction_kwargs` have the further turns and the calls
    that are expected in each. The column `tools` has the descriptions of the functions that are
    offered at first. The user's message of a later turn describes the functions that were held back
    until then; as in BFCL, an earlier call of such a function runs.

    Raises:
        ValueError: A file was given twice, or without the file of its questions.
    """
    questions, documents = _join_by_id(rows)
    notes: Counter[str] = Counter()

    def convert(row: SourceRow, _: int) -> list[dict[str, Any]]:
        if row.values.get("involved_classes") is None:
            notes[_NOTE_ONE_TURN] += 1
            return []
        return [_conversation_row(row, documents, data_source)]

    return convert_each(questions, convert, notes)


def _conversation_row(
    row: SourceRow, documents: Mapping[str, list[Any]], data_source: str
) -> dict[str, Any]:
    category = _category(row)
    turns, truth = _parse_turns(row), row.get_list("ground_truth")
    if len(truth) != len(turns) or not all(_is_list_of_texts(calls) for calls in truth):
        raise row.error(
            "ground_truth", truth, f"{len(turns)} lists of calls as text", _OTHER_ANSWERS
        )
    functions = [function_schema(function) for function in _available_functions(row, documents)]
    names = [function["function"]["name"] for function in functions]
    offered = _offered_names(functions, row, len(turns))
    scenario = {
        "initial_config": json.dumps(row.get_json("initial_config"), ensure_ascii=False),
        "involved_classes": row.get_strings("involved_classes"),
        "long_context": any(kind in category for kind in ("long_context", "composite")),
    }
    texts = []
    for number in range(1, len(turns)):
        new_names = offered[number] - offered[number - 1]
        descriptions = [
            json.dumps(function, ensure_ascii=False)
            for name, function in zip(names, functions, strict=True)
            if name in new_names
        ]
        messages = turns[number] or [NEW_FUNCTIONS_MESSAGE]
        texts.append("\n\n".join([*descriptions, *(message["content"] for message in messages)]))
    converted = make_rl_row(
        data_source=data_source,
        messages=turns[0],
        ground_truth=[json.dumps(calls, ensure_ascii=False) for calls in truth],
        ability="function_calling",
        extra_info={
            "index": row.get_text("id"),
            "category": category,
            "turns": MULTI_TURN,
            "tools_kwargs": {
                name: {"create_kwargs": scenario if name == names[0] else None} for name in names
            },
            "interaction_kwargs": {
                "name": "state_check",
                "turns": texts,
                "ground_truth": truth,
                "excluded_functions": row.get_strings("excluded_function"),
                **scenario,
            },
        },
    )
    first = [
        function for name, function in zip(names, functions, strict=True) if name in offered[0]
    ]
    return converted | {"tools": json.dumps(first, ensure_ascii=False)}


def function_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return BFCL's description of a function as an OpenAI-style schema."""
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": _json_schema(function.get("parameters") or {"type": "dict"}),
        },
    }


def _json_schema(value: Any) -> Any:
    """Return a description of values with the type names of JSON schema, at any depth."""
    if isinstance(value, list):
        return [_json_schema(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    schema = {key: _json_schema(item) for key, item in value.items()}
    if isinstance(schema.get("type"), str):
        schema["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
        if schema["type"] == "any":
            del schema["type"]
    return schema


def _offered_names(
    functions: Sequence[dict[str, Any]], row: SourceRow, num_turns: int
) -> list[set[str]]:
    """Return the names of the functions that are offered at each turn."""
    names = [{"name": function["function"]["name"]} for function in functions]
    return [
        {function["name"] for function in _functions_at_turn(names, row, turn)}
        for turn in range(num_turns)
    ]


def _category(row: SourceRow) -> str:
    return re.sub(r"_\d[\d-]*$", "", row.get_text("id"))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _single_turn_rows(
    row: SourceRow, turn: list[Message], truth: list[Any], functions: list[Any]
) -> _TurnRows:
    answer = expected_calls(truth, functions, row)
    messages = _prepend_system_message(functions, turn)
    return [(row.get_text("id"), messages, answer, {"turns": SINGLE_TURN, "turn": 0})]


def _check_turns(row: SourceRow, turns: list[list[Message]], truth: list[Any]) -> None:
    if len(truth) != len(turns) or not all(isinstance(calls, list) for calls in truth):
        raise row.error(
            "ground_truth",
            truth,
            f"{len(turns)} lists of calls, one per turn",
            _OTHER_ANSWERS,
        )


def _multi_turn_rows(
    row: SourceRow, turns: list[list[Message]], truth: list[Any], functions: list[Any]
) -> _TurnRows:
    turn_rows: _TurnRows = []
    history: list[Message] = []
    for number, (turn, calls) in enumerate(zip(turns, truth, strict=True)):
        answer = expected_calls(calls, functions, row)
        history += turn or [NEW_FUNCTIONS_MESSAGE]
        messages = _prepend_system_message(_functions_at_turn(functions, row, number), history)
        extra = {"turns": MULTI_TURN, "turn": number}
        turn_rows.append((f"{row.get_text('id')}/{number}", messages, answer, extra))
        history.append({"role": "assistant", "content": example_answer(answer)})
    return turn_rows


def _join_by_id(rows: Sequence[SourceRow]) -> tuple[list[SourceRow], dict[str, list[Any]]]:
    """Return questions joined with their answers, and function descriptions by file name."""
    questions: dict[str, SourceRow] = {}
    answers: dict[str, SourceRow] = {}
    documents: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        if "id" not in row.values and {"name", "parameters"} <= row.values.keys():
            row.get_text("name")
            function = {key: row.values.get(key) for key in ("name", "description", "parameters")}
            documents.setdefault(Path(row.file).stem, []).append(function)
            continue
        rows_by_id = questions if "question" in row.values else answers
        name = f"unnamed_{place}" if row.values.get("id") is None else row.get_text("id")
        if name in rows_by_id:
            raise row.error("id", name, "a unique id", "a file was given twice")
        rows_by_id[name] = row
    for name, row in answers.items():
        if name not in questions:
            raise row.error("id", name, "the id of a question", "the question file was not given")
    joined = [_merge_answer(name, row, answers.get(name)) for name, row in questions.items()]
    return joined, documents


def _merge_answer(name: str, row: SourceRow, answer: SourceRow | None) -> SourceRow:
    if answer is None:
        return SourceRow(row.file, row.place, {**row.values, "id": name})
    file = f"{row.file} (with {answer.file} {answer.place})"
    return SourceRow(file, row.place, {**row.values, **answer.values, "id": name})


def _parse_turns(row: SourceRow) -> list[list[Message]]:
    question = row.get("question")
    if isinstance(question, str) and not question.lstrip().startswith("["):
        return [[{"role": "user", "content": question}]]
    turns = row.get_list("question")
    # A single turn may lack the list around it.
    turns = [turns] if turns and isinstance(turns[0], dict) else turns
    for turn in turns:
        if not isinstance(turn, list) or not all(_is_message(message) for message in turn):
            raise row.error("question", turn, "turns, each a list of messages")
    if not turns or not turns[0]:
        raise row.error("question", turns, "a first turn with a message")
    return [[{key: m[key] for key in ("role", "content")} for m in turn] for turn in turns]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _with_source_texts(call: Any) -> Any:
    """Return accepted values of a Java or JavaScript call, with those of numbers as source text."""
    if not isinstance(call, Mapping):
        return call
    return {
        name: {argument: _source_values(values) for argument, values in options.items()}
        if isinstance(options, Mapping)
        else options
        for name, options in call.items()
    }


def _source_values(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    texts = [json.dumps(value) for value in values if isinstance(value, int | float)]
    return [*values, *texts]


def _expected_calls(row: SourceRow, category: str) -> list[Any] | None:
    """Return the expected calls: [] for an irrelevance question, None if they are unknown."""
    if row.values.get("ground_truth") is not None:
        return row.get_list("ground_truth")
    if category.endswith("irrelevance"):
        return []
    if category.endswith("relevance"):
        return None
    raise row.error(
        "ground_truth", "nothing", "the expected calls", "the possible_answer file was not given"
    )


def _available_functions(row: SourceRow, documents: Mapping[str, list[Any]]) -> list[Any]:
    for name in ("function", "functions", "tools"):
        if row.values.get(name) is not None:
            parsed = row.get_json(name)
            descriptions = [parsed] if isinstance(parsed, dict) else row.get_list(name)
            if not all(isinstance(item, dict) for item in descriptions):
                raise row.error(name, descriptions, "descriptions of functions, each an object")
            return descriptions
    functions: list[Any] = []
    hidden = set(row.get_strings("excluded_function"))
    row.get("involved_classes")  # raises an error if it is missing
    for involved in row.get_strings("involved_classes"):
        file = FUNCTION_FILES.get(involved, involved)
        if file not in documents:
            raise row.error(
                "involved_classes",
                involved,
                f"descriptions for it, in a file {file}.json",
                "the files of multi_turn_func_doc were not given",
            )
        functions += [item for item in documents[file] if item["name"] not in hidden]
    return functions


def _functions_at_turn(functions: list[Any], row: SourceRow, turn: int) -> list[Any]:
    """Return the functions of a turn without those that are held back until a later turn."""
    held_back = row.get_json("missed_function") if row.values.get("missed_function") else {}
    if not isinstance(held_back, dict) or not all(
        start.isdecimal() and isinstance(names, list) for start, names in held_back.items()
    ):
        raise row.error("missed_function", held_back, "{number of a turn: [names]}")
    hidden = [name for start, names in held_back.items() if int(start) > turn for name in names]
    return [item for item in functions if item.get("name") not in hidden]


def _prepend_system_message(functions: list[Any], messages: list[Message]) -> list[Message]:
    """Prepend one system message that includes the messages' own system texts."""
    text = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    return [make_system_message(functions, text), *(m for m in messages if m["role"] != "system")]


def expected_calls(truth: Sequence[Any], functions: Sequence[Any], row: SourceRow) -> str:
    """Return the calls that are right, as text in the form of `types.ground_truth`.

    Args:
        truth: one item per call: accepted values by argument, or a Python call.
        functions: descriptions of the functions.
        row: the row, for error messages.

    Raises:
        ValueError: an item has another form, or nothing can satisfy it.
    """
    parameters = parameter_names(functions)
    calls = []
    for item in truth:
        if isinstance(item, str):
            calls.append(parse_python_call(item, parameters, row, "ground_truth"))
            continue
        if not isinstance(item, Mapping) or len(item) != 1:
            raise row.error("ground_truth", item, "{function: {argument: [accepted values]}}")
        ((name, options),) = item.items()
        if not isinstance(options, Mapping):
            raise row.error("ground_truth", item, "{function: {argument: [accepted values]}}")
        calls.append(_accepted_call(name, options, functions, row))
    return format_calls_json(calls, row, "ground_truth")


def _accepted_call(
    name: str, options: Mapping[str, Any], functions: Sequence[Any], row: SourceRow
) -> dict[str, Any]:
    """Return the call with its arguments if there is one choice, else with what is accepted."""
    types, required = _parameter_types(name, functions)
    accepted: dict[str, list[Any]] = {}
    optional: list[str] = []
    for argument, values in options.items():
        where = f"ground_truth.{name}.{argument}"
        if not isinstance(values, list) or not values:
            raise row.error(where, values, "a non-empty list of values", _OTHER_ANSWERS)
        can_omit = "" in values and argument not in required
        if types and argument not in types:
            values = []
        elif not _takes_text(types.get(argument), values):
            takes_list = any(isinstance(value, list) for value in values)
            values = [[] if value == "" else value for value in values if value != "" or takes_list]
        choices = _accepted_values(values, where, row)
        if not choices and not can_omit:
            cause = "an argument that the function does not have, or requires"
            raise row.error(where, options[argument], "a value that can be given", cause)
        if choices:
            accepted[argument] = choices
            optional += [argument] if can_omit else []
    if unanswered := [argument for argument in required if argument not in accepted]:
        expected = f"accepted values of {', '.join(unanswered)}, which {name} requires"
        raise row.error(f"ground_truth.{name}", options, expected, _OTHER_ANSWERS)
    return {"name": name, **_simplified(accepted, optional)}


def _parameter_types(name: str, functions: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a function's parameters and the names of those that it requires.

    Both are empty if the function is not described.
    """
    parameters = parameter_schemas(functions).get(name, {})
    properties, required = parameters.get("properties"), parameters.get("required")
    types = {
        argument: schema.get("type") if isinstance(schema, dict) else None
        for argument, schema in (properties if isinstance(properties, dict) else {}).items()
    }
    return types, [name for name in types if isinstance(required, list) and name in required]


def _takes_text(kind: str | None, values: Sequence[Any]) -> bool:
    """Return whether the empty text is a value of an argument, and not only a sign to omit it.

    For an argument that takes lists, the empty text stands for the empty list as well.
    """
    return kind in _TEXT_TYPES or any(isinstance(value, str) and value for value in values)


def _accepted_values(values: Sequence[Any], where: str, row: SourceRow) -> list[Any]:
    """Return accepted values without repetitions; objects list the values of their members."""
    texts = [json.dumps(_accepted_value(value, where, row)) for value in values]
    return [json.loads(text) for text in dict.fromkeys(texts)]


def _accepted_value(value: Any, where: str, row: SourceRow) -> Any:
    if isinstance(value, Mapping):
        return _accepted_object(value, where, row)
    if isinstance(value, list):
        return [
            _accepted_object(item, where, row) if isinstance(item, Mapping) else item
            for item in value
        ]
    return value


def _accepted_object(members: Mapping[str, Any], where: str, row: SourceRow) -> Any:
    """Return an object as it is if there is one choice for it, else what its members accept."""
    accepted, optional = {}, []
    for name, values in members.items():
        if isinstance(values, str) or values == []:
            cause = "a member whose list of accepted values is missing"
            raise row.error(f"{where}.{name}", values, "a non-empty list of values", cause)
        accepted[name] = list(values) if isinstance(values, list) else [values]
        optional += [name] if "" in accepted[name] else []
    simple = _simplified(accepted, optional)
    return simple.get("arguments", simple)


def _simplified(accepted: Mapping[str, list[Any]], optional: Sequence[str]) -> dict[str, Any]:
    """Return `arguments` if each has one value that has no choices itself, else `accepted`."""
    if optional or any(len(values) > 1 or _has_choices(values) for values in accepted.values()):
        return {"accepted": dict(accepted), "optional": list(optional)}
    return {"arguments": {name: value for name, (value,) in accepted.items()}}


def _has_choices(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.keys() == {"accepted", "optional"}
    return isinstance(value, list) and any(_has_choices(item) for item in value)
