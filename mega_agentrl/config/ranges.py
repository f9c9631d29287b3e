"""Declared ranges of settings, and the base class of the schema's sections, which enforces them.

The range of a setting is part of its type:

    timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 10.0
    betas: Annotated[list[float], Length(at_least=2, at_most=2), Range(at_least=0, below=1)] = ...

`Range` bounds a number, or each number of a list or mapping; `Length` bounds a text, a list or a
mapping. NaN and infinity are in no range. Without a `Length`, a text has at most `MAX_TEXT_CHARS`
characters, and a list or mapping at most `MAX_ITEMS` items. No text has a NUL character, which
would end a path, or a character that UTF-8 cannot encode.

`Section.__post_init__` checks every field. `tools/make_config_reference.py` prints the ranges. The
options of estimators, losses and branching rules declare their ranges in the same way
(`config.declarations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from mega_agentrl.config.errors import ConfigError, check_range

MAX_TIMEOUT_S = 864_000
"""Ten days, longer than a job of any cluster; deadlines of the operating system stay in range."""
MAX_STEPS = 10_000_000
"""Maximum number of steps of any kind."""
MAX_TOKENS = 16_777_216
"""Maximum length of any text in tokens, beyond the context of every model."""
MAX_TEXT_CHARS = 4096
"""Maximum length of a text, that of a path on Linux."""
MAX_ITEMS = 10_000
"""Maximum number of items of a list or mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range of a number, as an annotation: `Annotated[float, Range(above=0, at_most=1)]`."""

    above: float = -inf
    """Largest number that is too small."""
    at_least: float = -inf
    """Smallest number of the range."""
    below: float = inf
    """Smallest number that is too large."""
    at_most: float = inf
    """Largest number of the range."""
    unit: str = ""
    """Unit of the number; empty if it has none, or if the name of the setting says what it
    counts."""

    def __contains__(self, number: float) -> bool:
        # Comparisons are exact for integers of any size, and false for NaN.
        is_finite = isinstance(number, int) or isfinite(number)
        is_above = self.above < number and self.at_least <= number
        return is_finite and is_above and number < self.below and number <= self.at_most

    def __str__(self) -> str:
        """Return the bounds, such as `above 0, at most 1 s`; empty without bounds."""
        bounds = {
            "above": self.above,
            "at least": self.at_least,
            "below": self.below,
            "at most": self.at_most,
        }
        text = ", ".join(f"{name} {bound}" for name, bound in bounds.items() if abs(bound) < inf)
        return f"{text} {self.unit}" if self.unit and text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a text in characters, or of a list or mapping in items."""

    at_least: int = 0
    at_most: int = MAX_ITEMS

    def __contains__(self, number: int) -> bool:
        return self.at_least <= number <= self.at_most

    def __str__(self) -> str:
        """Return the bounds, such as `2` or `1 to 10`."""
        if self.at_least == self.at_most:
            return str(self.at_most)
        return f"{self.at_least} to {self.at_most}"


_TEXT_LENGTH = Length(at_most=MAX_TEXT_CHARS)
_MAX_DEPTH = 8
"""Maximum nesting of a value whose type is `Any`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldType:
    """The type of a setting with its declared range."""

    kind: Any
    """The type without annotations, optional members and ranges: `float`, `list`, an enumeration,
    or `Any`."""
    is_optional: bool = False
    """Whether null is a value."""
    bounds: Range = field(default_factory=Range)
    """Range of the number, or of the numbers within a list or mapping."""
    length: Length | None = None
    """Declared length of the text, list or mapping."""
    item: FieldType | None = None
    """Type of the items of a list, or of the values of a mapping."""

    @property
    def is_number(self) -> bool:
        """Whether the value is a number, and not a list or mapping of them."""
        return self.kind in (int, float)

    @property
    def has_numbers(self) -> bool:
        """Whether the value is a number or has numbers inside."""
        return self.is_number or (self.item is not None and self.item.has_numbers)

    @property
    def expected(self) -> str:
        """Description of the values, such as `a number above 0, at most 864000 s, or null`."""
        if self.is_number:
            noun = "a whole number" if self.kind is int else "a finite number"
            text = f"{noun}, {self.bounds}" if str(self.bounds) else noun
        elif self.item is not None:
            noun = "items" if self.kind is list else "entries"
            text = f"{self.length or Length()} {noun}, each {self.item.expected}"
        elif self.kind is str:
            text = f"a text of {self.length or _TEXT_LENGTH} characters, without NUL, in UTF-8"
        elif self.kind is Any:
            text = f"finite numbers and short texts, nested at most {_MAX_DEPTH} deep"
        elif issubclass(self.kind, Enum):
            text = f"one of {', '.join(choice.name for choice in self.kind)}"
        else:
            text = "true or false" if self.kind is bool else str(self.kind.__name__)
        return f"{text}, or null" if self.is_optional else text

    @property
    def declared_range(self) -> str:
        """The declared range as the documentation shows it; empty if all values are valid."""
        noun = "characters" if self.kind is str else "items"
        parts = [f"{self.length} {noun}"] if self.length is not None else []
        if str(self.bounds):  # of the numbers within, for a list or a mapping
            parts.append(str(self.bounds))
        return "; ".join(parts)

    def check(self, value: object, key: str, depth: int = 0) -> None:
        """Raise a `ConfigError` that names `key` unless the value is in the range.

        The error of an item of a list names the list; that of an entry of a mapping, the entry.
        OmegaConf checks types, but not those of all items of lists and mappings.
        """
        if value is None and self.is_optional:
            return
        if self.is_number or isinstance(value, float):
            in_range = self._accepts_number(value)
        elif isinstance(value, str) and self.kind not in (list, dict):
            in_range = len(value) in (self.length or _TEXT_LENGTH) and is_plain_text(value)
        elif isinstance(value, list | tuple | Mapping):
            in_range = self.kind is not str and depth < _MAX_DEPTH
            in_range = in_range and len(value) in (self.length or Length())
        else:
            in_range = self.kind not in (str, list, dict)
        check_range(in_range, key, value, self.expected)
        item = self.item or _ANY
        if isinstance(value, Mapping):
            for name, entry in value.items():
                _TEXT.check(str(name), f"{key}, name of an entry")
                item.check(entry, f"{key}.{name}", depth + 1)
        elif isinstance(value, list | tuple):
            for element in value:
                try:
                    item.check(element, key, depth + 1)
                except ConfigError as error:
                    raise ConfigError(key, value, self.expected, error.cause) from error

    def _accepts_number(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.kind is not int or isinstance(value, int)) and value in self.bounds


_ANY = FieldType(kind=Any)
_TEXT = FieldType(kind=str)


def is_plain_text(text: str) -> bool:
    """Return whether a text has no NUL character and can be encoded in UTF-8."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def parse_type(annotation: Any) -> FieldType:
    """Return the type and the declared range of an evaluated annotation."""
    marks: list[Any] = []
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
    is_optional = False
    if get_origin(annotation) in (Union, UnionType):
        members = [kind for kind in get_args(annotation) if kind is not NoneType]
        is_optional = len(members) < len(get_args(annotation))
        (annotation,) = members  # the schema has no other unions
    bounds = next((mark for mark in marks if isinstance(mark, Range)), Range())
    length = next((mark for mark in marks if isinstance(mark, Length)), None)
    kind, item = annotation, None
    if get_origin(annotation) in (list, dict):
        kind = get_origin(annotation)
        # The range of the numbers within is declared outside of the list.
        item = parse_type(Annotated[(get_args(annotation)[-1], bounds)])
    return FieldType(kind=kind, is_optional=is_optional, bounds=bounds, length=length, item=item)


@cache
def setting_types(section: type) -> dict[str, FieldType]:
    """Return the type and range of every setting of a section, without its subsections."""
    hints = get_type_hints(section, include_extras=True)
    return {
        spec.name: parse_type(hints[spec.name])
        for spec in fields(section)
        if not is_dataclass(hints[spec.name])
    }


class Section:
    """Base of the schema's dataclasses: checks the declared range of every setting.

    A section that also checks several settings together does so in a `__post_init__` that calls
    this one first.

        @dataclass
        class WebRequestConfig(Section, key="tool.web"):
            ...
    """

    section_key = ""
    """Dotted key of the section; empty for the whole configuration."""

    def __init_subclass__(cls, key: str | None = None) -> None:
        super().__init_subclass__()
        if key is not None:
            cls.section_key = key

    def __post_init__(self) -> None:
        section: type = type(self)
        for name, kind in setting_types(section).items():
            kind.check(getattr(self, name), f"{self.section_key}.{name}".lstrip("."))
