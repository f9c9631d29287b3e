"""Questions of the tool-QA task, with answers and the tool calls that lead to them.

* `python`: a product that a small model cannot guess: `What is 47*83?`
* `search`: a fact: `What is the home of Bako?`
* `both`: a fact times a number: `What is the price of Bako times 37?`

The questions of a split use only its own entities and operands, and none occurs twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from mega_agentrl.data.toolqa.entity_splits import Split, SplitInventory
from mega_agentrl.data.toolqa.knowledge_base import NAME_ATTRIBUTES, NUMBER_ATTRIBUTES, Fact


class QuestionKind(StrEnum):
    """The tools a question needs."""

    python = "python"
    search = "search"
    both = "both"


@dataclass(frozen=True, slots=True)
class AnsweredToolCall:
    """A tool call with its result."""

    tool: str
    text: str
    result: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answer and the shortest sequence of calls that finds it."""

    kind: QuestionKind
    text: str
    answer: str
    calls: tuple[AnsweredToolCall, ...]

    @property
    def data_source(self) -> str:
        """The data source, by which results are grouped."""
        return f"toolqa_{self.kind}"


def make_questions(
    split: Split,
    inventory: SplitInventory,
    facts: Mapping[tuple[str, str], Fact],
    *,
    num_questions: int,
    seed: int,
) -> list[Question]:
    """Return `num_questions` different questions, about equally many of each kind.

    Raises:
        ValueError: the split has too few entities and operands.
    """
    rng = random.Random(f"toolqa questions {split} {seed}")
    pools = {kind: list(_iter_questions(kind, inventory, facts)) for kind in QuestionKind}
    questions: list[Question] = []
    for place, kind in enumerate(QuestionKind):
        wanted = (num_questions + len(QuestionKind) - 1 - place) // len(QuestionKind)
        if wanted > len(pools[kind]):
            raise ValueError(
                f"{split} questions: num_questions={num_questions} needs {wanted} of kind {kind}, "
                f"expected at most {len(pools[kind])}: the split has no more names and numbers"
            )
        questions.extend(rng.sample(pools[kind], wanted))
    rng.shuffle(questions)
    return questions


def _iter_questions(
    kind: QuestionKind, inventory: SplitInventory, facts: Mapping[tuple[str, str], Fact]
) -> Iterator[Question]:
    if kind is QuestionKind.python:
        for left, right in product(inventory.operands, repeat=2):
            yield _python_question(left, right)
    elif kind is QuestionKind.search:
        for entity, attribute in product(inventory.entities, NAME_ATTRIBUTES):
            yield _search_question(facts[entity, attribute])
    else:
        names = product(inventory.entities, NUMBER_ATTRIBUTES)
        for (entity, attribute), factor in product(names, inventory.operands):
            yield _search_and_python_question(facts[entity, attribute], factor)


def _multiplication_call(left: int, right: int) -> AnsweredToolCall:
    return AnsweredToolCall("python", f"{left}*{right}", str(left * right))


def _python_question(left: int, right: int) -> Question:
    call = _multiplication_call(left, right)
    return Question(QuestionKind.python, f"What is {call.text}?", call.result, (call,))


def _search_question(fact: Fact) -> Question:
    call = AnsweredToolCall("search", fact.query, fact.text)
    return Question(QuestionKind.search, f"What is the {fact.query}?", fact.value, (call,))


def _search_and_python_question(fact: Fact, factor: int) -> Question:
    calls = (
        AnsweredToolCall("search", fact.query, fact.text),
        _multiplication_call(int(fact.value), factor),
    )
    text = f"What is the {fact.query} times {factor}?"
    return Question(QuestionKind.both, text, calls[-1].result, calls)
