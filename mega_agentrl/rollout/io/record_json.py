"""Conversion of dataclass records to JSON values and back, by their type annotations.

Fields at their default are left out. Enums become their values, numbers of other libraries plain
numbers, tuples and lists become lists, mappings and records become objects. Floats are exact.
Values annotated as `Any` are not converted back: a tuple returns as a list, and a value without a
JSON form as text.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

_UNION_TYPES = (Union, types.UnionType)
_SCALAR_TYPES: Mapping[Any, Any] = {bool: bool, int: int, float: (int, float), str: str}


def to_json(value: Any) -> Any:
    """Convert a record, or a value in one, to a value that `json.dumps` accepts."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if is_dataclass(value) and not isinstance(value, type):
        return record_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [to_json(item) for item in value]
    return str(value)


def record_to_json(record: Any, *, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Convert the fields of a record that differ from their defaults, except `leave_out`."""
    values = {
        spec.name: (spec, getattr(record, spec.name))
        for spec in fields(record)
        if spec.name not in leave_out
    }
    return {
        name: to_json(value)
        for name, (spec, value) in values.items()
        if not _is_default(spec, value)
    }


def from_json(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value back to a value of type `kind`.

    Args:
        kind: Type or type annotation.
        value: The JSON value.
        where: Name of the value in error messages.

    Raises:
        ValueError: The value does not fit `kind`, or a record has missing or unknown fields.
    """
    if kind is Any:
        return value
    outer: Any = get_origin(kind) or kind
    inner = get_args(kind)
    if outer in _UNION_TYPES:
        for choice in inner:
            if _matches_json_form(choice, value):
                return from_json(choice, value, where)
    elif _matches_json_form(kind, value):
        if isinstance(outer, type) and issubclass(outer, Enum):
            return _parse_enum(outer, value, where)
        if outer in _SCALAR_TYPES:
            return value
        if _is_record(kind):
            return kind(**parse_record_fields(kind, value, where))
        if outer in (dict, Mapping):
            return {key: from_json(inner[1], item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            items = [from_json(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
            return tuple(items) if outer is tuple else items
        return value
    raise ValueError(f"{where}: got {_shorten(value)}, expected {kind}")


def parse_record_fields(
    kind: type, values: Mapping[str, Any], where: str, *, given: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Convert JSON fields to constructor arguments of `kind`.

    Fields in `given` are provided by the caller and must not be in `values`.
    """
    hints = _cached_type_hints(kind)
    known = {spec.name: spec for spec in fields(kind) if spec.name not in given}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"{where}: got the fields {', '.join(unknown)}, which {kind.__name__} does not have; "
            "was it written by a newer version?"
        )
    missing = sorted(
        name for name, spec in known.items() if name not in values and not _has_default(spec)
    )
    if missing:
        raise ValueError(f"{where}: expected the fields {', '.join(missing)} of {kind.__name__}")
    return {
        name: from_json(hints[name], value, f"{where}.{name}") for name, value in values.items()
    }


@cache
def _cached_type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind)


def _matches_json_form(kind: Any, value: Any) -> bool:
    """Return whether a JSON value has the form in which values of `kind` are written."""
    outer: Any = get_origin(kind) or kind
    if kind is Any or outer in _UNION_TYPES:
        return True
    if outer in (None, type(None)):
        return value is None
    if outer in _SCALAR_TYPES:
        wanted = _SCALAR_TYPES[outer]
        return isinstance(value, wanted) and (outer is bool or not isinstance(value, bool))
    if _is_record(outer) or outer in (dict, Mapping):
        return isinstance(value, dict)
    if isinstance(outer, type) and issubclass(outer, Enum):
        return isinstance(value, str | int)
    return isinstance(value, list)


def _parse_enum(kind: type[Enum], value: Any, where: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{where}: got {value!r}, expected one of {names}") from None


def _has_default(spec: Field[Any]) -> bool:
    return spec.default is not MISSING or spec.default_factory is not MISSING


def _is_default(spec: Field[Any], value: Any) -> bool:
    if spec.default_factory is not MISSING:
        return bool(value == spec.default_factory())
    return spec.default is not MISSING and bool(value == spec.default)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"
