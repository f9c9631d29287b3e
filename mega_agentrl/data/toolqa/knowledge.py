"""The knowledge base of tool-QA: one short sentence per entity and attribute.

Every entity has every attribute, so the query `price of Bako` has one document with both
words, which full-text ranking puts first; values are never entity names. Written as JSONL
with `id`, `title` and `text`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_agentrl.data.toolqa.names import Inventory, Split, value_names

NAME_ATTRIBUTES = ("home", "owner")
NUMBER_ATTRIBUTES = ("price", "weight")


@dataclass(frozen=True, slots=True)
class Fact:
    """`The price of Bako is 52.`, `The home of Bako is "Tirok".`

    The quotes give a name the tokens it also has in `\\boxed{Tirok}`, where no space precedes.
    """

    entity: str
    attribute: str
    value: str

    @property
    def query(self) -> str:
        """The search that finds it."""
        return f"{self.attribute} of {self.entity}"

    @property
    def text(self) -> str:
        """The document, which is also what a search answers."""
        value = self.value if self.value.isdigit() else f'"{self.value}"'
        return f"The {self.query} is {value}."


def make_facts(inventories: Mapping[Split, Inventory], seed: int) -> dict[tuple[str, str], Fact]:
    """Facts by (entity, attribute); a number is an operand of the entity's own split."""
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
    """One document a line."""
    with path.open("w", encoding="utf-8") as file:
        for fact in facts.values():
            document = {
                "id": f"{fact.entity}-{fact.attribute}",
                "title": fact.query,
                "text": fact.text,
            }
            file.write(json.dumps(document) + "\n")
