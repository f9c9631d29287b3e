"""BFCL: questions of one turn and of several, kept apart by `extra_info.turns`.

A row has `id`, `question` (turns, each a list of messages; v1: a text), `function` and
`ground_truth`. The leaderboard ships these in several files; rows with one `id` are put together,
so give the question files and their `possible_answer` files at once. Rows of several turns have no
`function` but `involved_classes`: give the files of `multi_turn_func_doc` too, under their names.

One turn: one RL row, `turns=single_turn`, whose ground truth lists every answer that will do.
Several: one RL row for each turn, `turns=multi_turn`, index `id/turn`: the prompt holds the turns
before with the calls expected there, the ground truth is this turn's calls. What those calls
answered is not in the data, so nothing stands for it in the prompt, and BFCL's own check, which
compares the state the calls leave behind, is not done here. A turn without a message of its own is
where BFCL hands out a function it held back (`missed_function`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_agentrl.data.convert_bfcl_truth import possible_answers
from mega_agentrl.data.convert_calls import parameter_names, system_message
from mega_agentrl.data.convert_row import Converted, SourceRow, rl_row
from mega_agentrl.types.records import Message

SINGLE_TURN, MULTI_TURN = "single_turn", "multi_turn"
NEW_FUNCTIONS: Message = {
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
"""By class, the name of the file that describes its functions."""
_TOO_MANY = "left out: more possible answers than are written out"
_NO_CALLS_KNOWN = "left out: some call is expected, the data does not say which"


def convert_bfcl(rows: Sequence[SourceRow], data_source: str) -> Converted:
    """RL rows for all questions; raises ValueError that names the row and field."""
    questions, documents = _joined(rows)
    result = Converted([])
    for row in questions:
        category = re.sub(r"_\d[\d-]*$", "", row.text("id"))
        turns = _turns(row)
        truth = _truth(row, category)
        if truth is None:
            result.notes[_NO_CALLS_KNOWN] += 1
            continue
        several = len(turns) > 1 or any(isinstance(item, list) for item in truth)
        made = (
            _multi_turn(row, turns, truth, _functions(row, documents))
            if several
            else _single_turn(row, turns[0], truth, _functions(row, documents))
        )
        if made is None:
            result.notes[_TOO_MANY] += 1
            continue
        for index, messages, answers, extra in made:
            extra_info = {"index": index, "category": category, **extra}
            result.rows.append(
                rl_row(
                    data_source=data_source,
                    messages=messages,
                    ground_truth=answers,
                    ability="function_calling",
                    extra_info=extra_info,
                )
            )
    return result


_Made = list[tuple[str, list[Message], list[str], dict[str, Any]]]


def _single_turn(
    row: SourceRow, turn: list[Message], truth: list[Any], functions: list[Any]
) -> _Made | None:
    answers = possible_answers(truth, parameter_names(functions), row)
    if answers is None:
        return None
    messages = _with_system(functions, turn)
    return [(row.text("id"), messages, answers, {"turns": SINGLE_TURN, "turn": 0})]


def _multi_turn(
    row: SourceRow, turns: list[list[Message]], truth: list[Any], functions: list[Any]
) -> _Made | None:
    if len(truth) != len(turns) or not all(isinstance(calls, list) for calls in truth):
        raise row.error(
            "ground_truth",
            truth,
            f"{len(turns)} lists of calls, one a turn",
            "the answers of another version of BFCL",
        )
    parameters = parameter_names(functions)
    made: _Made = []
    history: list[Message] = []
    for number, (turn, calls) in enumerate(zip(turns, truth, strict=True)):
        answers = possible_answers(calls, parameters, row)
        if answers is None:
            return None
        history += turn or [NEW_FUNCTIONS]
        messages = _with_system(_offered(functions, row, number), history)
        extra = {"turns": MULTI_TURN, "turn": number}
        made.append((f"{row.text('id')}/{number}", messages, answers, extra))
        history.append({"role": "assistant", "content": answers[0]})
    return made


def _joined(rows: Sequence[SourceRow]) -> tuple[list[SourceRow], dict[str, list[Any]]]:
    """Questions with what other files say about them, and function descriptions by file name."""
    questions: dict[str, SourceRow] = {}
    answers: dict[str, SourceRow] = {}
    documents: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        if "id" not in row.values and {"name", "parameters"} <= row.values.keys():
            row.text("name")
            shown = {key: row.values.get(key) for key in ("name", "description", "parameters")}
            documents.setdefault(Path(row.file).stem, []).append(shown)
            continue
        known = questions if "question" in row.values else answers
        name = f"unnamed_{place}" if row.values.get("id") is None else row.text("id")
        if name in known:
            raise row.error("id", name, "an id of its own", "a file was given twice")
        known[name] = row
    orphan = next((row for name, row in answers.items() if name not in questions), None)
    if orphan is not None:
        raise orphan.error(
            "id", orphan.values.get("id"), "the id of a question", "its question file was not given"
        )
    joined = [_with_answer(name, row, answers.get(name)) for name, row in questions.items()]
    return joined, documents


def _with_answer(name: str, row: SourceRow, answer: SourceRow | None) -> SourceRow:
    if answer is None:
        return SourceRow(row.file, row.number, {**row.values, "id": name})
    file = f"{row.file} (with {answer.file} row {answer.number})"
    return SourceRow(file, row.number, {**row.values, **answer.values, "id": name})


def _turns(row: SourceRow) -> list[list[Message]]:
    question = row.value("question")
    if isinstance(question, str) and not question.lstrip().startswith("["):
        return [[{"role": "user", "content": question}]]
    turns = row.items("question")
    # One turn may stand without the list around it.
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


def _truth(row: SourceRow, category: str) -> list[Any] | None:
    """The expected calls; none for an irrelevance question, None where they are not known."""
    if row.values.get("ground_truth") is not None:
        return row.items("ground_truth")
    if category.endswith("irrelevance"):
        return []
    if category.endswith("relevance"):
        return None
    raise row.error(
        "ground_truth", "nothing", "the expected calls", "the possible_answer file was not given"
    )


def _functions(row: SourceRow, documents: Mapping[str, list[Any]]) -> list[Any]:
    for name in ("function", "functions", "tools"):
        given = row.values.get(name)
        if given is not None:
            parsed = row.parsed(name)
            listed = [parsed] if isinstance(parsed, dict) else row.items(name)
            if not all(isinstance(item, dict) for item in listed):
                raise row.error(name, listed, "descriptions of functions, each an object")
            return listed
    functions: list[Any] = []
    hidden = set(row.names("excluded_function"))
    row.value("involved_classes")
    for involved in row.names("involved_classes"):
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


def _offered(functions: list[Any], row: SourceRow, turn: int) -> list[Any]:
    """The functions of a turn: without those held back until a later one."""
    held_back = row.parsed("missed_function") if row.values.get("missed_function") else {}
    if not isinstance(held_back, dict) or not all(
        start.isdecimal() and isinstance(names, list) for start, names in held_back.items()
    ):
        raise row.error("missed_function", held_back, "{number of a turn: [names]}")
    hidden = [name for start, names in held_back.items() if int(start) > turn for name in names]
    return [item for item in functions if item.get("name") not in hidden]


def _with_system(functions: list[Any], messages: list[Message]) -> list[Message]:
    """The messages with one system message in front, into which their own go."""
    own = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    return [system_message(functions, own), *(m for m in messages if m["role"] != "system")]
