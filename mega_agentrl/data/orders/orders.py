"""Orders of the order game, and the messages of its two sides.

A game has four turns of the assistant: a greeting, `NUM_WANTED` questions, and the order. The
customer names the wanted attributes after the greeting, and tells the value of each attribute that
is asked for, wanted or not:

    user       Customer 47 here.
    assistant  Good day. What may I order?
    user       I need street and brand.
    assistant  <think> first </think> ask street
    user       street=Tirok
    assistant  <think> second </think> ask brand
    user       brand=Lamok
    assistant  <think> known </think> order street=Tirok brand=Lamok

The order is right if it has all wanted attributes with their values. The greeting does not matter.
A question about another attribute is wasted, since the customer answers only `NUM_WANTED`
questions. Values are drawn from all of `value_names` in every split: the held-out splits have new
games, not new names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mega_agentrl.data.generated.entity_splits import OPERANDS, Split, value_names

ATTRIBUTES = ("brand", "city", "colour", "model", "shop", "street")
NUM_WANTED = 2
DATA_SOURCE = "orders"

_QUESTION = re.compile(rf"ask ({'|'.join(ATTRIBUTES)})$")
_ORDER = re.compile(r"order((?: [a-z]+=[A-Za-z]+)+)$")


@dataclass(frozen=True, slots=True)
class Order:
    """The task of one game: a customer, the wanted attributes, and the answers to questions."""

    customer: int
    """Number of the customer, which does not affect the reward."""
    values: Mapping[str, str]
    """Value of each attribute."""
    wanted: tuple[str, ...]
    """Attributes that must be ordered, in the order in which the customer names them."""

    @property
    def greeting(self) -> str:
        """First message of the customer."""
        return f"Customer {self.customer} here."

    @property
    def wanted_values(self) -> dict[str, str]:
        """The values that must be ordered."""
        return {attribute: self.values[attribute] for attribute in self.wanted}


def make_orders(split: Split, *, num_orders: int, seed: int) -> list[Order]:
    """Return the random orders of a split."""
    rng = random.Random(f"orders {split} {seed}")
    names = value_names()
    return [
        Order(
            customer=rng.choice(OPERANDS),
            values=dict(zip(ATTRIBUTES, rng.sample(names, len(ATTRIBUTES)), strict=True)),
            wanted=tuple(rng.sample(ATTRIBUTES, NUM_WANTED)),
        )
        for _ in range(num_orders)
    ]


def format_request(wanted: Sequence[str]) -> str:
    """Return the customer's message after the greeting."""
    return f"I need {' and '.join(wanted)}."


def format_value(attribute: str, value: str) -> str:
    """Return the customer's answer to a question."""
    return f"{attribute}={value}"


def format_question(attribute: str) -> str:
    """Return the assistant's question."""
    return f"ask {attribute}"


def format_order(values: Mapping[str, str]) -> str:
    """Return the assistant's order."""
    return f"order {' '.join(format_value(*item) for item in values.items())}"


def parse_question(message: str) -> str | None:
    """Return the attribute that the end of a message asks for, or None."""
    match = _QUESTION.search(message)
    return match[1] if match else None


def parse_order(message: str) -> dict[str, str] | None:
    """Return the values that the end of a message orders, or None."""
    match = _ORDER.search(message)
    return dict(item.split("=") for item in match[1].split()) if match else None
