"""Functions of the function-calling task, each with one typed parameter, and their schemas.

A function is named like an entity of `entity_splits`, so that training shows the syllables of a
held-out function's name, but never the name. Its parameter is drawn anew for every catalogue
and named after its type: a tiny model learns within minutes to copy names and values and to write
what a type needs, but not to look up an arbitrary name in the catalogue.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

TEXT_VALUES = ("blue", "cold", "fast", "green", "hot", "slow", "warm", "white")
INTEGER_VALUES = tuple(range(10))
SYLLABLE_CHARS = 2


class ParameterType(StrEnum):
    """JSON types of arguments."""

    integer = "integer"
    string = "string"
    boolean = "boolean"


PARAMETER_NAMES = {
    ParameterType.integer: "count",
    ParameterType.string: "label",
    ParameterType.boolean: "flag",
}
Value = int | str | bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a policy may call."""

    name: str
    parameter_type: ParameterType
    """Type of the only parameter, which is required."""

    @property
    def parameter(self) -> str:
        """Name of the parameter."""
        return PARAMETER_NAMES[self.parameter_type]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in the form that chat templates take."""
        properties = {self.parameter: {"type": str(self.parameter_type)}}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "parameters": {"type": "object", "properties": properties},
            },
        }


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function with a value of its parameter."""

    function: Function
    value: Value

    @property
    def as_dict(self) -> dict[str, Any]:
        """The call as a policy writes it in JSON."""
        return {"name": self.function.name, "arguments": {self.function.parameter: self.value}}


def make_function(name: str, rng: random.Random) -> Function:
    """Return a function with a parameter of a random type."""
    return Function(name, rng.choice(list(ParameterType)))


def make_call(function: Function, rng: random.Random) -> Call:
    """Return a call with a random value."""
    match function.parameter_type:
        case ParameterType.integer:
            return Call(function, rng.choice(INTEGER_VALUES))
        case ParameterType.string:
            return Call(function, rng.choice(TEXT_VALUES))
        case ParameterType.boolean:
            return Call(function, rng.random() < 0.5)
