"""The knowledge base of the tool-QA task: one sentence per entity and attribute.

Every entity has every attribute, so the query `price of Bako` matches both words in exactly one
document, which full-text search ranks first; values are never entity names. The corpus is JSONL
with `id`, `title` and `text`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_agentrl.data.toolqa.entity_splits import Split, SplitInventory, value_names

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
