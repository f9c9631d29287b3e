"""Conversion of records to plain values, for JSON, and back.

A record is a dataclass. Its fields may hold numbers, text, bytes, enums, tuples, lists, mappings,
other records, and unions of these. Plain values are numbers, text, lists, tuples, dicts and None.
Numbers are restored exactly, including NaN and infinities; the annotations of the fields tell
tuples from lists. Values annotated as `Any` are passed through.

msgspec evaluates the annotations, so a record's module must import their names at run time and not
only under `TYPE_CHECKING`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

import msgspec

from mega_agentrl.errors import InputError

_SCALARS = (str, bytes, int, float, Enum, type(None))
PLAIN_TYPES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (Integral, int),
    (Real, float),
    (str, str),
    (Mapping, dict),
    (Sequence, list),
)
"""Plain type by abstract type, for values of other libraries such as NumPy numbers."""


def to_builtins(value: Any, *, fallback: Callable[[Any], Any] | None = None) -> Any:
    """Convert a record, or a container of records, to plain values.

    Args:
        value: The record.
        fallback: Converts values of other types, such as those of a field of type `Any`.

    Raises:
        TypeError: A value has another type, and there is no `fallback`.
    """

    def convert_other(other: Any) -> Any:
        for kind, plain_type in PLAIN_TYPES:
            if isinstance(other, kind):
                return plain_type(other)
        if fallback is None:
            raise TypeError(
                f"got {other!r}, expected numbers, text, enums, containers and records; probable "
                "cause: a value that does not belong in a saved state"
            )
        return fallback(other)

    return msgspec.to_builtins(value, enc_hook=convert_other)


def from_builtins[ValueT](kind: type[ValueT], data: Any, where: str) -> ValueT:
    """Restore a value from the output of `to_builtins`, also after a round trip through JSON.

    An integer may stand for a float; nothing else is coerced. A missing field with a default has
    the default, so that data of an earlier version can be read; unknown fields are refused.

    Args:
        kind: The record's class, or another type.
        data: The plain values.
        where: Name of the data in error messages.

    Raises:
        ValueError: The data do not fit; the message names the field.
    """
    try:
        value = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        cause = "damaged data, or data of another version"
        raise InputError(where, str(error), f"the plain form of {kind}", cause) from None
    _check_fields(value, data, where)
    return value


def _check_fields(value: Any, data: Any, where: str) -> None:
    """Refuse unknown fields, which msgspec ignores.

    Args:
        value: The converted value.
        data: The plain values that it was made of.
        where: Name of the data in error messages.
    """
    if value is data:
        return
    items: Iterable[tuple[Any, Any]]
    if is_dataclass(value):
        names = {spec.name for spec in fields(value)}
        if unknown := sorted(data.keys() - names):
            expected = f"only fields of {type(value).__name__}: {', '.join(sorted(names))}"
            raise InputError(
                where, f"unknown fields {unknown}", expected, "a newer version wrote it"
            )
        items = [(name, getattr(value, name)) for name in names & data.keys()]
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, _SCALARS):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        if not isinstance(item, _SCALARS):
            _check_fields(item, data[key], f"{where}.{key}")
