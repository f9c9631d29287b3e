r"""Converts question-answer data sets: Search-R1, GSM8K, and ARPO's own parquet.

Search-R1 rows have `question` and `golden_answers`, any of which is correct; their prompts offer
the tool `search`. GSM8K rows have `question` and an `answer` that ends with `#### 18`; the number
is the ground truth, also for the tool `gsm8k`. Both get a system message that asks for ARPO's
answer format.

ARPO's parquet is in the RL format already. Its system prompts contain a backspace character where
the `\b` of `\boxed` was meant; each one is repaired and counted. Its indices come from the original
data sets and may repeat, so rows are renumbered and the old index becomes `source_index`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mega_agentrl.data.chat_messages import validate_messages
from mega_agentrl.data.converters.source_row import (
    ConversionResult,
    SourceRow,
    convert_each,
    make_rl_row,
    unique_row_id,
)
from mega_agentrl.errors import InputError
from mega_agentrl.types.ground_truth import accepted_answers
from mega_agentrl.types.records import Message

BACKSPACE = "\x08"
ANSWER_PROMPT = (
    "Reason between <think> and </think>. You may use the tools you are offered, as often as you "
    "need. Give the final answer, as short as possible, as <answer> \\boxed{your answer} </answer>."
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def convert_search_r1(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert Search-R1 rows; a row's own `data_source` (nq, hotpotqa, ...) is kept.

    Rows of the training set have their answers in `reward_model.ground_truth.target`.
    """
    row_ids: dict[str, set[str]] = {}

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        source = _data_source(row, data_source)
        index = unique_row_id(row, place, row_ids.setdefault(source, set()))
        made = make_rl_row(
            data_source=source,
            messages=_question_messages(row.get_text("question").strip()),
            ground_truth=_golden_answers(row),
            ability="search",
            extra_info={"index": index, "tools_kwargs": {"search": {"create_kwargs": None}}},
        )
        return [made]

    return convert_each(rows, convert)


def convert_gsm8k(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert GSM8K rows; `tools_kwargs` hold the answer for the tool `gsm8k`."""
    row_ids: set[str] = set()

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        answer = row.get_text("answer")
        number = answer.rpartition("####")[2].strip().replace(",", "").removeprefix("$")
        if "####" not in answer or not _NUMBER.fullmatch(number):
            raise row.error("answer", answer[-80:], "a solution that ends in '#### number'")
        made = make_rl_row(
            data_source=data_source,
            messages=_question_messages(row.get_text("question").strip()),
            ground_truth=number,
            ability="math",
            extra_info={
                "index": unique_row_id(row, place, row_ids),
                "need_tools_kwargs": True,
                "tools_kwargs": {"gsm8k": {"create_kwargs": {"ground_truth": number}}},
            },
        )
        return [made]

    return convert_each(rows, convert)


def convert_arpo(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    r"""Convert ARPO rows, with `\b` for each backspace; `data_source` is a default."""
    notes: Counter[str] = Counter()

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        messages = _prompt_messages(row)
        made = make_rl_row(
            data_source=_data_source(row, data_source),
            messages=[
                {**message, "content": message["content"].replace(BACKSPACE, "\\b")}
                for message in messages
            ],
            ground_truth=_arpo_ground_truth(row),
            ability=row.values.get("ability") or "tool_use",
            extra_info={**_arpo_extra_info(row), "index": place},
        )
        num_backspaces = sum(message["content"].count(BACKSPACE) for message in messages)
        if num_backspaces:
            notes["rows with repaired backspace characters"] += 1
            notes["backspace characters replaced by \\b"] += num_backspaces
        return [made]

    result = convert_each(rows, convert, notes)
    _make_one_type([row["reward_model"] for row in result.rows])
    return result


def _make_one_type(cells: Sequence[dict[str, Any]]) -> None:
    """Make every ground truth a list if one is: a column of parquet has one type."""
    if any(isinstance(cell["ground_truth"], list) for cell in cells):
        for cell in cells:
            if isinstance(cell["ground_truth"], str):
                cell["ground_truth"] = [cell["ground_truth"]]


def _question_messages(question: str) -> tuple[Message, ...]:
    system: Message = {"role": "system", "content": ANSWER_PROMPT}
    return (system, {"role": "user", "content": question})


def _golden_answers(row: SourceRow) -> list[str]:
    field, answers = "golden_answers", row.values.get("golden_answers")
    if answers is None and isinstance(row.values.get("reward_model"), Mapping):
        field = "reward_model.ground_truth"
        answers = row.values["reward_model"].get("ground_truth")
    try:
        return list(accepted_answers(answers))
    except InputError as error:
        raise row.error(field, answers, error.expected) from error


def _data_source(row: SourceRow, default: str) -> str:
    return row.get_text("data_source") if row.values.get("data_source") else default


def _prompt_messages(row: SourceRow) -> tuple[Message, ...]:
    prompt = row.get_list("prompt")
    if not all(isinstance(message, dict) for message in prompt):
        raise row.error("prompt", prompt, "a list of chat messages")
    return validate_messages(prompt, f"{row.file} {row.place}, field prompt")


def _arpo_extra_info(row: SourceRow) -> dict[str, Any]:
    """Return the row's `extra_info` without empty structs, which parquet cannot store."""
    extra = {name: value for name, value in row.get_dict("extra_info").items() if value != {}}
    tools = extra.get("tools_kwargs")
    if not isinstance(tools, dict | None):
        raise row.error("extra_info.tools_kwargs", tools, "a struct with a member for each tool")
    if tools:
        extra["tools_kwargs"] = {
            name: {"create_kwargs": None} if kwargs == {} else kwargs
            for name, kwargs in tools.items()
        }
    if "index" in extra:
        extra["source_index"] = str(extra["index"])
    return extra


def _arpo_ground_truth(row: SourceRow) -> str | list[str]:
    cell = row.get("reward_model")
    truth = cell.get("ground_truth") if isinstance(cell, Mapping) else None
    try:
        answers = list(accepted_answers(truth))
    except InputError as error:
        raise row.error("reward_model.ground_truth", truth, error.expected) from error
    return answers if isinstance(truth, list | Mapping) else answers[0]
