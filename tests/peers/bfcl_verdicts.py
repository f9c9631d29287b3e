"""bfcl-eval's verdicts (`ast_checker`) on its own questions, with right and perturbed answers.

Its questions in Java and JavaScript are left out: there it reads arguments as source text of these
languages, with parsers that are not installed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.enums import Language
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

from mega_agentrl.data.converters.bfcl import convert_bfcl
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.reward.function_call import score
from mega_agentrl.types.ground_truth import accepted_answers
from tests.peers.comparison import Comparison, Reason

CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
DATA = Path(bfcl_eval.__file__).parent / "data"
MODEL = next(name for name, config in MODEL_CONFIG_MAPPING.items() if not config.underscore_to_dot)
Calls = list[dict[str, dict[str, Any]]]
"""Calls as bfcl-eval decodes them: arguments by name, by function."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a question."""

    category: str
    question: Mapping[str, Any]
    possible_answer: list[Any]
    truth: Any
    """The ground truth of the converted row."""
    kind: str
    """What is done to a right answer."""
    calls: Calls

    def __repr__(self) -> str:
        return f"{self.question['id']}, {self.kind}: {self.calls}, of {self.possible_answer}"


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield the comparison over all questions and answers."""
    yield Comparison(
        function="ast_checker = function_call.score(match=bfcl)",
        inputs=chain.from_iterable(map(_answers, CATEGORIES)),
        ours=_our_verdict,
        theirs=_their_verdict,
        reasons=(
            Reason("5.0 is 5 here", lambda answer: answer.kind.endswith("as a float")),
            Reason(
                "calls are matched as well as they can be here, one after the other there",
                lambda answer: answer.kind == "other order",
            ),
        ),
    )


def _our_verdict(answer: Answer) -> bool:
    calls = [
        {"name": name, "arguments": arguments}
        for call in answer.calls
        for name, arguments in call.items()
    ]
    text = f"<think>Which?</think>{json.dumps(calls)}"
    return bool(score(text, accepted_answers(answer.truth), match="bfcl").value)


def _their_verdict(answer: Answer) -> bool:
    result = ast_checker(
        answer.question["function"],
        copy.deepcopy(answer.calls),
        answer.possible_answer,
        Language.PYTHON,
        answer.category,
        MODEL,
    )
    return bool(result["valid"])


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _answers(category: str) -> Iterator[Answer]:
    """Yield the answers to the questions that convert."""
    name = f"BFCL_v4_{category}.json"
    questions = _read(DATA / name)
    possible = {row["id"]: row["ground_truth"] for row in _read(DATA / "possible_answer" / name)}
    converted = convert_bfcl(
        [
            SourceRow(name, question["id"], {**question, "ground_truth": possible[question["id"]]})
            for question in questions
        ],
        "bfcl",
    )
    question_by_id = {question["id"]: question for question in questions}
    for rl_row in converted.rows:
        question = question_by_id[rl_row["extra_info"]["index"]]
        truth = rl_row["reward_model"]["ground_truth"]
        accepted = possible[question["id"]]
        right = [_first_values(call) for call in accepted]
        for kind, calls in _variants(right, accepted, question["function"]):
            yield Answer(category, question, accepted, truth, kind, calls)


def _first_values(call: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    ((name, arguments),) = call.items()
    chosen = {key: _first(values) for key, values in arguments.items() if values[0] != ""}
    return {name: chosen}


def _first(values: list[Any]) -> Any:
    """Return the first accepted value, with the first ones of an object's members."""
    value = values[0]
    if isinstance(value, Mapping):
        return _first_of_object(value)
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [_first_of_object(item) for item in value]
    return value


def _first_of_object(accepted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: values[0] if isinstance(values, list) else values
        for key, values in accepted.items()
        if not (isinstance(values, list) and values and values[0] == "")
    }


def _variants(
    right: Calls, possible: list[Any], functions: list[Any]
) -> Iterator[tuple[str, Calls]]:
    """Yield the right answer and perturbed ones, each with one change to the first call."""
    yield "right", right
    yield "no call", []
    yield "a call twice", [*right, right[0]]
    if len(right) > 1:
        yield "other order", right[::-1]
        yield "a call too few", right[1:]
    ((name, arguments),) = right[0].items()

    def changed(new: dict[str, Any], new_name: str = name) -> Calls:
        return [{new_name: new}, *right[1:]]

    yield "another function", changed(arguments, f"{name}_2")
    yield "unknown argument", changed({**arguments, "surely_unknown": 1})
    accepted = next(iter(possible[0].values()))
    for key in accepted:
        if key in arguments:
            yield f"without {key}", changed({k: v for k, v in arguments.items() if k != key})
        yield f"empty {key}", changed({**arguments, key: ""})
        for number, value in enumerate(accepted[key][1:4], start=2):
            if value != "":
                yield f"value {number} of {key}", changed({**arguments, key: _first([value])})
    for key, value in arguments.items():
        for kind, new in _other_values(value):
            yield f"{key} {kind}", changed({**arguments, key: new})


def _other_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield values beside an accepted one."""
    match value:
        case bool():
            yield "negated", not value
            yield "as a text", str(value)
            yield "as a number", int(value)
        case int():
            yield "plus one", value + 1
            yield "as a float", float(value)
            yield "as a text", str(value)
        case float():
            yield "plus a bit", value + 0.001
            yield "as a text", str(value)
            if value.is_integer():
                yield "as an integer", int(value)
        case str():
            yield "in upper case", value.upper()
            yield "without spaces and commas", value.replace(" ", "").replace(",", "")
            yield "and more", f"{value} and more"
            yield "in a list", [value]
        case list():
            yield "reversed", value[::-1]
            yield "with an item more", [*value, *value[:1]]
            yield "empty", []
        case dict():
            yield "with a member more", {**value, "surely_unknown": 1}
            yield "with a member less", dict(list(value.items())[1:])
