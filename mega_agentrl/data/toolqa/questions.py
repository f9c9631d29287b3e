"""Facts and questions of the tool-QA task, with answers and the tool calls that lead to them.

The knowledge base has one sentence per entity and attribute. Every entity has every attribute, so
the query `price of Bako` matches both words in exactly one document, which full-text search ranks
first; values are never entity names. The corpus is JSONL with `id`, `title` and `text`.

* `python`: a product that a small model cannot guess: `What is 47*83?`
* `search`: a fact: `What is the home of Bako?`
* `both`: a fact times a number: `What is the price of Bako times 37?`

The questions of a split use only its own entities and operands, and none occurs twice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

from mega_agentrl.data.generated.entity_splits import Split, SplitInventory, value_names
from mega_agentrl.errors import InputError

NAME_ATTRIBUTES = ("home", "owner")
NUMBER_ATTRIBUTES = ("price", "weight")


@dataclass(frozen=True, slots=True)
class Fact:
    r"""A fact such as `The price of Bako is 52.` or `The home of Bako is "Tirok".`.

    The quotes give a name the same tokens as in `\boxed{Tirok}`, where no space precedes it.
    """

    entity: str
    attribute: str
    value: str

    @property
    def query(self) -> str:
        """The search query that finds the fact."""
        return f"{self.attribute} of {self.entity}"

    @property
    def text(self) -> str:
        """The document, which is also the search result."""
        value = self.value if self.value.isdigit() else f'"{self.value}"'
        return f"The {self.query} is {value}."


def make_facts(
    inventories: Mapping[Split, SplitInventory], seed: int
) -> dict[tuple[str, str], Fact]:
    """Return facts by (entity, attribute); numbers are operands of the entity's split."""
    rng = random.Random(f"toolqa facts {seed}")
    values = value_names()
    facts: dict[tuple[str, str], Fact] = {}
    for inventory in inventories.values():
        for entity in inventory.entities:
            for attribute in NAME_ATTRIBUTES:
                facts[entity, attribute] = Fact(entity, attribute, rng.choice(values))
            for attribute in NUMBER_ATTRIBUTES:
                number = rng.choice(inventory.operands)
                facts[entity, attribute] = Fact(entity, attribute, str(number))
    return facts


def write_corpus(facts: Mapping[tuple[str, str], Fact], path: Path) -> None:
    """Write one JSON document per line."""
    with path.open("w", encoding="utf-8") as file:
        for fact in facts.values():
            document = {
                "id": f"{fact.entity}-{fact.attribute}",
                "title": fact.query,
                "text": fact.text,
            }
            file.write(json.dumps(document) + "\n")


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
        count = (num_questions + len(QuestionKind) - 1 - place) // len(QuestionKind)
        if count > len(pools[kind]):
            raise InputError(
                f"{split} questions, num_questions",
                num_questions,
                f"a number that needs at most {len(pools[kind])} of kind {kind}, not {count}",
                "the split has no more names and numbers",
            )
        questions.extend(rng.sample(pools[kind], count))
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
