"""Questions with answers: Search-R1, GSM8K, and ARPO's own parquet.

Search-R1: `question`, `golden_answers` (any one will do), offered the tool `search`. GSM8K:
`question`, `answer` ending in `#### 18`; the number is the ground truth, for the tool `gsm8k` too.
Both get a system message that asks for ARPO's form of an answer.

ARPO's parquet is in the RL format already. Its system prompts hold a backspace character where
the `\\b` of `\\boxed` was meant: each is put right and counted. Its indices are those of the sets
it was put together from and may repeat, so rows are numbered anew; the old one is `source_index`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mega_agentrl.data.convert_row import Converted, SourceRow, rl_row, unique_index
from mega_agentrl.data.dataset import check_messages
from mega_agentrl.types.records import Message

BACKSPACE = "\x08"
ANSWER_PROMPT = (
    "Reason between <think> and </think>. You may use the tools you are offered, as often as you "
    "need. Give the final answer, as short as possible, as <answer> \\boxed{your answer} </answer>."
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def convert_search_r1(rows: Sequence[SourceRow], data_source: str) -> Converted:
    """One RL row for each; a `data_source` (nq, hotpotqa, ...) of a row's own is kept.

    Rows that were made for training have their answers in `reward_model.ground_truth.target`.
    """
    seen: dict[str, set[str]] = {}
    converted = []
    for place, row in enumerate(rows):
        source = _source(row, data_source)
        index = unique_index(row, place, seen.setdefault(source, set()))
        converted.append(
            rl_row(
                data_source=source,
                messages=_asked(row.text("question").strip()),
                ground_truth=_golden_answers(row),
                ability="search",
                extra_info={"index": index, "tools_kwargs": {"search": {"create_kwargs": None}}},
            )
        )
    return Converted(converted)


def convert_gsm8k(rows: Sequence[SourceRow], data_source: str) -> Converted:
    """One RL row for each, whose `tools_kwargs` hold the answer for the tool `gsm8k`."""
    seen: set[str] = set()
    converted = []
    for place, row in enumerate(rows):
        answer = row.text("answer")
        number = answer.rpartition("####")[2].strip().replace(",", "").removeprefix("$")
        if "####" not in answer or not _NUMBER.fullmatch(number):
            raise row.error("answer", answer[-80:], "a solution that ends in '#### number'")
        converted.append(
            rl_row(
                data_source=data_source,
                messages=_asked(row.text("question").strip()),
                ground_truth=number,
                ability="math",
                extra_info={
                    "index": unique_index(row, place, seen),
                    "need_tools_kwargs": True,
                    "tools_kwargs": {"gsm8k": {"create_kwargs": {"ground_truth": number}}},
                },
            )
        )
    return Converted(converted)


def convert_arpo(rows: Sequence[SourceRow], data_source: str) -> Converted:
    """The rows with `\\b` for every backspace in a message; data_source: for rows without one."""
    notes: Counter[str] = Counter()
    truths = [_arpo_truth(row) for row in rows]
    # Parquet holds one type a column: a list for all as soon as one row has several answers.
    if any(isinstance(truth, list) for truth in truths):
        truths = [[truth] if isinstance(truth, str) else truth for truth in truths]
    converted = []
    for place, (row, truth) in enumerate(zip(rows, truths, strict=True)):
        messages = _messages(row)
        num_lost = sum(message["content"].count(BACKSPACE) for message in messages)
        if num_lost:
            notes["rows with backspace characters put right"] += 1
            notes["backspace characters turned into \\b"] += num_lost
        extra = _arpo_extra(row)
        converted.append(
            rl_row(
                data_source=_source(row, data_source),
                messages=[
                    {**message, "content": message["content"].replace(BACKSPACE, "\\b")}
                    for message in messages
                ],
                ground_truth=truth,
                ability=row.values.get("ability") or "tool_use",
                extra_info={**extra, "index": place},
            )
        )
    return Converted(converted, notes)


def _asked(question: str) -> tuple[Message, ...]:
    system: Message = {"role": "system", "content": ANSWER_PROMPT}
    return (system, {"role": "user", "content": question})


def _golden_answers(row: SourceRow) -> list[str]:
    field, answers = "golden_answers", row.values.get("golden_answers")
    if answers is None and isinstance(row.values.get("reward_model"), Mapping):
        field = "reward_model.ground_truth.target"
        truth = row.values["reward_model"].get("ground_truth")
        answers = truth.get("target") if isinstance(truth, Mapping) else truth
    answers = [answers] if isinstance(answers, str) else answers
    listed = answers if isinstance(answers, list) else []
    if not listed or not all(isinstance(text, str) and text.strip() for text in listed):
        raise row.error(field, answers, "a non-empty list of texts")
    return listed


def _source(row: SourceRow, otherwise: str) -> str:
    return row.text("data_source") if row.values.get("data_source") else otherwise


def _messages(row: SourceRow) -> tuple[Message, ...]:
    prompt = row.items("prompt")
    if not all(isinstance(message, dict) for message in prompt):
        raise row.error("prompt", prompt, "a list of chat messages")
    return check_messages(prompt, f"{row.file} row {row.number}, field prompt")


def _arpo_extra(row: SourceRow) -> dict[str, Any]:
    """The row's `extra_info`, without empty structs, which parquet cannot hold."""
    extra = {name: value for name, value in row.struct("extra_info").items() if value != {}}
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


def _arpo_truth(row: SourceRow) -> Any:
    cell = row.value("reward_model")
    truth = cell.get("ground_truth") if isinstance(cell, Mapping) else None
    texts = [truth] if isinstance(truth, str) else truth
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise row.error("reward_model.ground_truth", truth, "a text or a non-empty list of texts")
    return truth
