"""Validators of JSON schemas whose work is bounded, whatever the schema and the value are.

A schema comes from a user or from an MCP server, and the value from a policy. Together they can ask
for work without end: alternatives that double at each level, references that lead back, a list
whose items are compared in pairs, a regular expression that backtracks. A check therefore counts
its work and ends with `CheckTooLargeError` at a limit, and patterns run in the regular expression
engine of pydantic, whose time grows linearly with the text.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from jsonschema.protocols import Validator

    Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]

MAX_CHECK_STEPS = 30_000
"""Steps of one check of arguments: at a few microseconds each about 0.1 s, which the event loop can
spare. A call of a policy takes some hundred; a list of 10,000 numbers about 20,000."""
MAX_SCHEMA_STEPS = 1_000_000
"""Steps of the check that a schema is one, which happens before the run starts."""
MAX_REFERENCE_STEPS = 60_000
"""Steps of following each reference of a schema once, which happens before the run starts."""
MAX_PATTERN_STATES = 10_000
"""States of a pattern's automaton, as far as its text tells; an address has a few hundred."""

_ITEMS_PER_STEP = 10
"""Items of a list that are compared or counted in the time of a step."""
_CHARS_PER_STEP = 100
"""Characters of an error message that are written, or states times characters that a pattern
visits, in the time of a step."""
_REFERENCE_STEPS = 10
_COUNTED_REPETITION = re.compile(r"(\)?)[?*+]*\{(\d*)(?:,(\d*))?\}")

_work: ContextVar[_Work] = ContextVar("_work")


class CheckTooLargeError(ValueError):
    """A check takes more steps than it may."""


@dataclass(slots=True)
class _Work:
    """The steps that a check may still take."""

    steps_left: int
    anchor_steps: int
    """Steps of a reference by name, for which the whole schema is searched."""

    def spend(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise CheckTooLargeError("the check takes too many steps")


@contextmanager
def bounded_work(max_steps: int, *, num_subschemas: int) -> Iterator[None]:
    """Limit the work of the checks in the block, which raise `CheckTooLargeError` beyond it.

    Args:
        max_steps: The limit.
        num_subschemas: Number of objects in the schema.
    """
    token = _work.set(_Work(max_steps, _REFERENCE_STEPS + num_subschemas // 2))
    try:
        yield
    finally:
        _work.reset(token)


@cache
def bounded_kind(kind: type[Validator], *, has_pattern_names: bool) -> type[Validator]:
    """Return the validator class of a draft whose checks belong in `bounded_work`.

    Args:
        kind: The class of `jsonschema`.
        has_pattern_names: Whether the schema has `patternProperties`; `unevaluatedProperties`,
            whose check would run them with backtracking, is then not checked.
    """
    own: dict[str, Keyword] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    if has_pattern_names:
        own["unevaluatedProperties"] = _not_checked
    keywords = {
        name: _counted(name, own.get(name, keyword)) for name, keyword in kind.VALIDATORS.items()
    }
    bounded: Any = extend(kind, keywords)
    evolve = bounded.evolve

    def evolve_to_same_kind(self: Any, **changes: Any) -> Any:
        schema = changes.get("schema", self.schema)
        if isinstance(schema, dict) and "$schema" in schema:  # names a class without bounds
            changes["schema"] = {key: schema[key] for key in schema if key != "$schema"}
        return evolve(self, **changes)

    bounded.evolve = evolve_to_same_kind
    return cast("type[Validator]", bounded)


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches within a text, or cannot be read by the engine."""
    matcher = _matcher(pattern)
    if matcher is None:
        return True
    states, engine = matcher
    _work.get().spend(1 + states * len(text) // _CHARS_PER_STEP)
    return engine.isinstance_python(text)


def is_readable_pattern(pattern: str) -> bool:
    """Return whether a pattern can be matched in linear time, and is not too large."""
    return _matcher(pattern) is not None


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> tuple[int, SchemaValidator] | None:
    num_states = _count_states(pattern)
    if num_states > MAX_PATTERN_STATES:
        return None
    schema = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
    try:
        return num_states, SchemaValidator(schema)
    except PatternError:
        return None


def _count_states(pattern: str) -> int:
    """Return an upper bound of the states of a pattern's automaton.

    A counted repetition repeats a character or a group; that of a group counts for the whole.
    """
    states, factor = len(pattern), 1
    for group_end, low, high in _COUNTED_REPETITION.findall(pattern):
        count = max(int(number[:6] or 0) for number in (low, high or "0"))
        if group_end:
            factor *= max(1, count)
        else:
            states += count
    return states * factor


def _counted(name: str, keyword: Keyword) -> Keyword:
    """Return a keyword's check that counts its steps."""
    is_reference = name in ("$ref", "$dynamicRef", "$recursiveRef")
    compares_pairs = name == "uniqueItems"

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        work = _work.get()
        num_steps = 1
        if isinstance(value, list | dict):
            num_steps += len(value) // _ITEMS_PER_STEP
        if isinstance(instance, list | dict):
            num_steps += len(instance) // _ITEMS_PER_STEP
        if is_reference:
            num_steps += _REFERENCE_STEPS if _is_pointer(value) else work.anchor_steps
        elif compares_pairs and isinstance(instance, list) and not _are_sortable(instance):
            num_steps += len(instance) ** 2 // _ITEMS_PER_STEP
        work.spend(num_steps)
        for error in keyword(validator, value, instance, schema) or ():
            work.spend(1 + len(error.message) // _CHARS_PER_STEP)
            yield error

    return check


def _is_pointer(reference: object) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _are_sortable(items: list[Any]) -> bool:
    """Return whether `jsonschema` sorts the items instead of comparing each with each."""
    return all(isinstance(item, str) for item in items) or all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in items
    )


def _pattern(
    validator: Any, pattern: str, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, schemas: Mapping[str, Any], instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, subschema in schemas.items():
        for name, value in instance.items():
            if matches(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [
        name
        for name in instance
        if name not in known and not any(matches(pattern, name) for pattern in patterns)
    ]
    if validator.is_type(allowed, "object"):
        for name in extras:
            yield from validator.descend(instance[name], allowed, path=name)
    elif not allowed and extras:
        names = ", ".join(map(repr, extras))
        were = "was" if len(extras) == 1 else "were"
        yield ValidationError(f"Additional properties are not allowed ({names} {were} unexpected)")


def _not_checked(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    return iter(())
