"""Functions of the function-calling task, with typed parameters, and their schemas.

A function is named like an entity of `entity_splits`, so that training never shows the name of a
held-out function, though it knows the syllables. Names of parameters are common words; their types
are drawn for each function, so that a policy must read the schema. The parameters of a function
have different types, so that a request may give their values in any order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mega_agentrl.data.generated.entity_splits import Split, SplitInventory

PARAMETER_NAMES = ("code", "key", "level", "mark", "mode", "port", "rank", "slot")
TEXT_VALUES = ("blue", "cold", "fast", "green", "hot", "slow", "warm", "white")
INTEGER_VALUES = tuple(range(10))
MAX_PARAMETERS = 1


class ParameterType(StrEnum):
    """JSON types of arguments."""

    integer = "integer"
    string = "string"
    boolean = "boolean"


Value = int | str | bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a policy may call."""

    name: str
    parameters: tuple[tuple[str, ParameterType], ...]
    """Name and type of each parameter; all are required."""

    @property
    def first_syllable(self) -> str:
        """The first token of the name."""
        return self.name[:2]

    @property
    def last_syllable(self) -> str:
        """The last token of the name."""
        return self.name[2:]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema as chat templates take it."""
        properties = {name: {"type": str(kind)} for name, kind in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "parameters": {"type": "object", "properties": properties},
            },
        }


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function with a value for each of its parameters."""

    function: Function
    values: tuple[Value, ...]
    """Values in the order of the parameters."""

    @property
    def as_dict(self) -> dict[str, Any]:
        """The call as a policy writes it in JSON."""
        names = [name for name, _ in self.function.parameters]
        arguments = dict(zip(names, self.values, strict=True))
        return {"name": self.function.name, "arguments": arguments}


def make_functions(
    inventories: Mapping[Split, SplitInventory], seed: int
) -> dict[Split, tuple[Function, ...]]:
    """Return the functions of each split, one for every entity of the split."""
    rng = random.Random(f"calls functions {seed}")
    return {
        split: tuple(_make_function(name, rng) for name in inventory.entities)
        for split, inventory in inventories.items()
    }


def make_call(function: Function, rng: random.Random) -> Call:
    """Return a call with random values."""
    values: list[Value] = []
    for _, kind in function.parameters:
        match kind:
            case ParameterType.integer:
                values.append(rng.choice(INTEGER_VALUES))
            case ParameterType.string:
                values.append(rng.choice(TEXT_VALUES))
            case ParameterType.boolean:
                values.append(rng.random() < 0.5)
    return Call(function, tuple(values))


def _make_function(name: str, rng: random.Random) -> Function:
    count = rng.randint(1, MAX_PARAMETERS)
    names = rng.sample(PARAMETER_NAMES, count)
    kinds = rng.sample(list(ParameterType), count)
    return Function(name, tuple(zip(names, kinds, strict=True)))
