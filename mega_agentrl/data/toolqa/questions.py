"""Questions of tool-QA, of three kinds, each with its answer and the calls that lead there.

* `python`: a product that a small model cannot guess: `What is 47*83?`
* `search`: a fact: `What is the home of Bako?`
* `both`: a fact times a number: `What is the price of Bako times 37?`

A split's questions use its own entities and numbers only, and none occurs twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from mega_agentrl.data.toolqa.knowledge import NAME_ATTRIBUTES, NUMBER_ATTRIBUTES, Fact
from mega_agentrl.data.toolqa.names import Inventory, Split


class Kind(StrEnum):
    """The tools a question needs."""

    python = "python"
    search = "search"
    both = "both"


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call and what the tool answers."""

    tool: str
    text: str
    result: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer and the calls of the straight way to it."""

    kind: Kind
    text: str
    answer: str
    calls: tuple[Call, ...]

    @property
    def data_source(self) -> str:
        """The name under which results are grouped."""
        return f"toolqa_{self.kind}"


def make_questions(
    split: Split,
    inventory: Inventory,
    facts: Mapping[tuple[str, str], Fact],
    *,
    num_questions: int,
    seed: int,
) -> list[Question]:
    """`num_questions` different questions, as equal a number of each kind as it divides into.

    Raises ValueError when the split's names and numbers do not give that many.
    """
    rng = random.Random(f"toolqa questions {split} {seed}")
    pools = {kind: list(_all(kind, inventory, facts)) for kind in Kind}
    questions: list[Question] = []
    for place, kind in enumerate(Kind):
        wanted = (num_questions + len(Kind) - 1 - place) // len(Kind)
        if wanted > len(pools[kind]):
            raise ValueError(
                f"{split} questions: num_questions={num_questions} needs {wanted} of kind {kind}, "
                f"expected at most {len(pools[kind])}: the split has no more names and numbers"
            )
        questions.extend(rng.sample(pools[kind], wanted))
    rng.shuffle(questions)
    return questions


def _all(
    kind: Kind, inventory: Inventory, facts: Mapping[tuple[str, str], Fact]
) -> Iterator[Question]:
    if kind is Kind.python:
        for left, right in product(inventory.operands, repeat=2):
            yield _python(left, right)
    elif kind is Kind.search:
        for entity, attribute in product(inventory.entities, NAME_ATTRIBUTES):
            yield _search(facts[entity, attribute])
    else:
        names = product(inventory.entities, NUMBER_ATTRIBUTES)
        for (entity, attribute), factor in product(names, inventory.operands):
            yield _both(facts[entity, attribute], factor)


def _multiply(left: int, right: int) -> Call:
    return Call("python", f"{left}*{right}", str(left * right))


def _python(left: int, right: int) -> Question:
    call = _multiply(left, right)
    return Question(Kind.python, f"What is {call.text}?", call.result, (call,))


def _search(fact: Fact) -> Question:
    call = Call("search", fact.query, fact.text)
    return Question(Kind.search, f"What is the {fact.query}?", fact.value, (call,))


def _both(fact: Fact, factor: int) -> Question:
    calls = (Call("search", fact.query, fact.text), _multiply(int(fact.value), factor))
    text = f"What is the {fact.query} times {factor}?"
    return Question(Kind.both, text, calls[-1].result, calls)
