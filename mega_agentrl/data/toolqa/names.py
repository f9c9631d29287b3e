"""Names and numbers of tool-QA, and which split may use them.

Names are put together from a fixed inventory of syllables, each of which is one token:
entities such as `Bako` from `ENTITY_HEADS` x `ENTITY_TAILS`, values such as `Tirok` from
`VALUE_HEADS` x `VALUE_TAILS`. So a name that training never showed is still made of tokens
that it did show, and copying it is a skill rather than a memory. The two inventories share
no name: a search for an entity can never hit a value.

Operands are the two-digit numbers from 32 on, the smallest whose products all have four
digits. Entities and operands are dealt to the splits without overlap.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TypeVar

ItemT = TypeVar("ItemT")

VOWELS = "aiou"
ENTITY_HEADS = tuple(head + vowel for head, vowel in product("BDGHJKWZ", VOWELS))
ENTITY_TAILS = tuple(head + vowel for head, vowel in product("bdglprtv", VOWELS))
VALUE_HEADS = tuple(head + vowel for head, vowel in product("LMNSTV", VOWELS))
VALUE_TAILS = tuple(head + vowel + "k" for head, vowel in product("lmnr", VOWELS))
OPERANDS = tuple(range(32, 100))


class Split(StrEnum):
    """train: RL and demonstrations. dev: stops the warm start. validation: held out."""

    train = "train"
    dev = "dev"
    validation = "validation"


_SHARES = {Split.train: 0.64, Split.dev: 0.16, Split.validation: 0.20}


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one split may talk about."""

    entities: tuple[str, ...]
    operands: tuple[int, ...]


def entity_names() -> tuple[str, ...]:
    """All entities, in a fixed order."""
    return tuple(head + tail for head, tail in product(ENTITY_HEADS, ENTITY_TAILS))


def value_names() -> tuple[str, ...]:
    """All values of an attribute that is a name, in a fixed order."""
    return tuple(head + tail for head, tail in product(VALUE_HEADS, VALUE_TAILS))


def deal(seed: int) -> dict[Split, Inventory]:
    """Entities and operands of each split; every one belongs to exactly one split."""
    rng = random.Random(f"toolqa names {seed}")
    entities = _cut(entity_names(), rng)
    operands = _cut(OPERANDS, rng)
    return {split: Inventory(entities[split], operands[split]) for split in Split}


def _cut(items: tuple[ItemT, ...], rng: random.Random) -> dict[Split, tuple[ItemT, ...]]:
    shuffled = rng.sample(items, len(items))
    parts: dict[Split, tuple[ItemT, ...]] = {}
    start = 0
    for split in Split:
        stop = start + round(len(items) * _SHARES[split])
        parts[split] = tuple(shuffled[start : len(items) if split is Split.validation else stop])
        start = stop
    return parts
