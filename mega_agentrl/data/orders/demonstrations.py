"""Demonstrations for the warm start: about half of the questions ask for a random attribute.

The other half ask for the next wanted attribute. An order has the values that the customer gave,
and random values for wanted attributes that were not asked for, which are almost always wrong. A
model trained on both can do either; RL then teaches it to ask for what is wanted, which shows in
the reward.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mega_agentrl.data.generated.entity_splits import (
    VALUE_PREFIXES,
    VALUE_SUFFIXES,
    value_names,
)
from mega_agentrl.data.generated.tokenizer import TaskVocabulary
from mega_agentrl.data.orders.orders import (
    ATTRIBUTES,
    NUM_WANTED,
    Order,
    format_order,
    format_question,
    format_request,
    format_value,
)
from mega_agentrl.types.records import Message

GREETINGS = (
    "Good day. What may I order?",
    "Welcome. What may I order?",
    "Hello. Tell me what you need.",
)
QUESTION_THOUGHTS = ("first", "second")
"""Thoughts before questions about the wanted attributes."""
THINK_TAGS = ("<think>", "</think>")
VOCABULARY = TaskVocabulary(
    tokens=(*THINK_TAGS, *(format_value(attribute, "") for attribute in ATTRIBUTES)),
    spaced_syllables=ATTRIBUTES,
    syllables=(*VALUE_PREFIXES, *VALUE_SUFFIXES),
)


def make_demonstrations(
    orders: Sequence[Order], *, num_demonstrations: int, seed: int
) -> list[list[Message]]:
    """Return demonstrations of the orders in turn, reshuffled in every pass."""
    rng = random.Random(f"orders demonstrations {seed}")
    demonstrations: list[list[Message]] = []
    while len(demonstrations) < num_demonstrations:
        for order in rng.sample(orders, len(orders)):
            are_random_questions = [rng.random() < 0.5 for _ in range(NUM_WANTED)]
            demonstrations.append(make_demonstration(order, are_random_questions, rng))
    return demonstrations[:num_demonstrations]


def make_demonstration(
    order: Order, are_random_questions: Sequence[bool], rng: random.Random
) -> list[Message]:
    """Return a game in which the marked questions ask for a random attribute."""
    messages = [
        _user(order.greeting),
        _assistant(rng.choice(GREETINGS)),
        _user(format_request(order.wanted)),
    ]
    known: dict[str, str] = {}
    plan = zip(QUESTION_THOUGHTS, order.wanted, are_random_questions, strict=True)
    for thought, attribute, is_random in plan:
        if is_random:
            thought, attribute = "any", rng.choice(ATTRIBUTES)
        known[attribute] = order.values[attribute]
        messages.append(_assistant_with_thought(thought, format_question(attribute)))
        messages.append(_user(format_value(attribute, order.values[attribute])))
    thought = "known" if known.keys() >= set(order.wanted) else "guess"
    values = {wanted: known.get(wanted) or rng.choice(value_names()) for wanted in order.wanted}
    return [*messages, _assistant_with_thought(thought, format_order(values))]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _assistant_with_thought(thought: str, text: str) -> Message:
    return _assistant(f"<think> {thought} </think> {text}")
