"""Names and numbers of the generated tasks, and their assignment to splits.

Names are composed of a fixed inventory of syllables, each of which is one token: entities such as
`Bako` from `ENTITY_PREFIXES` x `ENTITY_SUFFIXES`, values such as `Tirok` from `VALUE_PREFIXES` x
`VALUE_SUFFIXES`. A name that training never showed still consists of known tokens, so that a model
that has learned to copy names can copy it. The two inventories share no name, so that a search for
an entity never matches a value.

Operands are the two-digit numbers from 32 on, all of whose products have four digits. Entities and
operands are assigned to the splits without overlap.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

VOWELS = "aiou"
ENTITY_PREFIXES = tuple(head + vowel for head, vowel in product("BDGHJKWZ", VOWELS))
ENTITY_SUFFIXES = tuple(head + vowel for head, vowel in product("bdglprtv", VOWELS))
VALUE_PREFIXES = tuple(head + vowel for head, vowel in product("LMNSTV", VOWELS))
VALUE_SUFFIXES = tuple(head + vowel + "k" for head, vowel in product("lmnr", VOWELS))
OPERANDS = tuple(range(32, 100))


class Split(StrEnum):
    """Splits of a task."""

    train = "train"
    """RL and demonstrations."""
    dev = "dev"
    """Decides when the warm start ends."""
    validation = "validation"
    """Held out."""


_SPLIT_FRACTIONS = {Split.train: 0.64, Split.dev: 0.16, Split.validation: 0.20}


@dataclass(frozen=True, slots=True)
class SplitInventory:
    """Entities and operands of one split."""

    entities: tuple[str, ...]
    operands: tuple[int, ...]


def entity_names() -> tuple[str, ...]:
    """Return all entities in a fixed order."""
    return tuple(head + tail for head, tail in product(ENTITY_PREFIXES, ENTITY_SUFFIXES))


def value_names() -> tuple[str, ...]:
    """Return all name values in a fixed order."""
    return tuple(head + tail for head, tail in product(VALUE_PREFIXES, VALUE_SUFFIXES))


def make_split_inventories(seed: int) -> dict[Split, SplitInventory]:
    """Assign every entity and operand to exactly one split."""
    rng = random.Random(f"toolqa names {seed}")
    entities = split_items(entity_names(), rng)
    operands = split_items(OPERANDS, rng)
    return {split: SplitInventory(entities[split], operands[split]) for split in Split}


def split_items[ItemT](
    items: tuple[ItemT, ...], rng: random.Random
) -> dict[Split, tuple[ItemT, ...]]:
    """Assign every item to exactly one split."""
    shuffled = rng.sample(items, len(items))
    by_split: dict[Split, tuple[ItemT, ...]] = {}
    start = 0
    for split in Split:
        stop = start + round(len(items) * _SPLIT_FRACTIONS[split])
        by_split[split] = tuple(shuffled[start : len(items) if split is Split.validation else stop])
        start = stop
    return by_split
