"""Keeps control tokens out of texts that a chat template renders.

A text must not turn into a token with a meaning of its own. Before the template renders the texts,
the first character of each control token in them is replaced by a mark, a character that occurs in
none of them; after that, a control token is one that the template wrote. The marks are undone in
the rendered text, and the tokens that began with one are encoded as ordinary text.

Also marked is the beginning of a control token at the end of a text, which the next text could
complete: templates write the parts of a message one behind the other. Where it was not completed,
the text is encoded as if there had been no mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.images import ImageInput

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message

_NONCHARACTERS = (
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane + last) for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF)),
)
"""Code points that Unicode keeps free for use within a program: 66, of which a few are needed."""

_REPLACEMENT = "\ufffd"


class ControlTokenFinder:
    """Finds control tokens, and beginnings of them at the end of a text, in linear time.

    Args:
        tokens: texts of the tokens.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # Longest first: one may contain another.
        texts = sorted({token for token in tokens if token}, key=lambda text: (-len(text), text))
        rests: dict[str, list[str]] = {}
        for text in texts:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        # Only the first character is matched, so that tokens that overlap are all found.
        starts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        self._start = re.compile("|".join(starts) or r"(?!)")
        self._token = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._first_char = re.compile("|".join(map(re.escape, rests)) or r"(?!)")
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._max_chars = max(map(len, texts), default=0)

    def starts(self, text: str) -> list[int]:
        """Return the positions of the first characters, in order."""
        positions = {match.start() for match in self._start.finditer(text)}
        end = len(text.rstrip())  # templates trim texts
        tail = self._first_char.finditer(text, max(0, end - self._max_chars + 1), end)
        begun = {match.start() for match in tail if text[match.start() : end] in self._beginnings}
        return sorted(positions | begun)

    def token_at(self, text: str, position: int) -> str:
        """Return the longest token that begins at a position, empty if none does."""
        match = self._token.match(text, position)
        return match[0] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The marks of one rendering: which character stands for which."""

    mark_by_char: Mapping[str, str]
    """Mark of each first character of a token."""
    taken: Sequence[str] = ()
    """Marks that occur in a text, which loses them; empty unless a text has all noncharacters."""

    @classmethod
    def for_texts(cls, texts: Iterable[str], first_chars: Iterable[str]) -> Marks:
        """Return marks of these first characters that occur in none of the texts."""
        chars = sorted(set(first_chars))
        joined = "".join(texts)
        used = [char for char in _NONCHARACTERS if char in joined]
        unused = [char for char in _NONCHARACTERS if char not in used]
        marks = [*unused, *used][: len(chars)]
        return cls(mark_by_char=dict(zip(chars, marks, strict=True)), taken=marks[len(unused) :])

    def insert(self, text: str, positions: Iterable[int]) -> str:
        """Return a text with marks at these positions."""
        marks = [(position, self.mark_by_char[text[position]]) for position in positions]
        for mark in self.taken:
            text = text.replace(mark, _REPLACEMENT)
        pieces: list[str] = []
        end = 0
        for position, mark in marks:
            pieces += (text[end:position], mark)
            end = position + 1
        return "".join((*pieces, text[end:]))

    def split(self, rendered: str, finder: ControlTokenFinder) -> Iterator[tuple[str, bool]]:
        """Yield the pieces of a rendered text without marks, and whether each is a marked token."""
        text = rendered
        for char, mark in self.mark_by_char.items():
            text = text.replace(mark, char)
        start = 0
        for match in re.finditer(f"[{''.join(self.mark_by_char.values())}]", rendered):
            token = finder.token_at(text, match.start()) if match.start() >= start else ""
            if token:
                yield text[start : match.start()], False
                yield token, True
                start = match.start() + len(token)
        yield text[start:], False


_PROMPT_ROLES = ("system", "developer", "user")
_TEMPLATE_TAG = re.compile(r"</?([A-Za-z_][\w.:-]*)(?=[=>]|\s+[\w-]+=)")
"""A tag in the source of a chat template, and its name."""

_TextFunction = Callable[[str, bool], str]
"""Returns what is rendered for a text; the second argument is whether others wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTexts:
    """The texts to which a chat template and its tokenizer give a meaning."""

    in_prompts: ControlTokenFinder
    """Finds special tokens and those between turns, which no text may become."""
    in_others: ControlTokenFinder
    """Finds tags as well, which texts of others may not become."""
    tokens: ControlTokenFinder
    """Finds all of these tokens and nothing else."""
    turn_ids: frozenset[int]
    """Ids of special tokens and of those between turns."""
    tag: re.Pattern[str]
    """Matches the first character of tags that the template writes as ordinary text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedInputs:
    """The inputs of a template, with marks in all texts where a control token begins."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    marks: Marks


def mark_inputs(
    controls: ControlTexts,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    follows_answer: bool = False,
) -> MarkedInputs:
    """Return the inputs of a chat template with marks in their texts.

    Args:
        controls: what has a meaning.
        messages: the conversation.
        tools: schemas of tools.
        variables: variables of the template.
        follows_answer: whether an answer precedes the messages.
    """
    found: dict[tuple[str, bool], tuple[str, list[int]]] = {}

    def find(text: str, is_of_others: bool) -> str:
        plain = replace_lone_surrogates(text)
        plain = controls.tag.sub("&lt;", plain) if is_of_others else plain
        finder = controls.in_others if is_of_others else controls.in_prompts
        found[text, is_of_others] = plain, finder.starts(plain)
        return plain

    def convert(function: _TextFunction, marks: Marks) -> MarkedInputs:
        return MarkedInputs(
            messages=list(_convert_messages(messages, function, follows_answer)),
            tools=[_convert(tool, function, is_of_others=True) for tool in tools or ()],
            variables={
                name: _convert(value, function, is_of_others=True)
                for name, value in (variables or {}).items()
            },
            marks=marks,
        )

    inputs = convert(find, Marks(mark_by_char={}))
    first_chars = [text[at] for text, positions in found.values() for at in positions]
    if not first_chars:
        return inputs
    marks = Marks.for_texts((text for text, _ in found.values()), first_chars)
    return convert(lambda text, level: marks.insert(*found[text, level]), marks)


def _convert_messages(
    messages: Sequence[Message], function: _TextFunction, follows_answer: bool
) -> Iterator[Message]:
    """Yield the messages as templates expect them, with what the function returns for each text."""
    for message in messages:
        role = message.get("role")
        is_answer = role == "assistant"
        content_is_of_others = not is_answer and (follows_answer or role not in _PROMPT_ROLES)
        converted = {
            name: _convert(value, function, is_of_others=name != "content" or content_is_of_others)
            for name, value in message.items()
        }
        if converted.get("content") is None:
            converted["content"] = ""
        yield converted
        follows_answer = follows_answer or is_answer


def _convert(value: Any, function: _TextFunction, *, is_of_others: bool) -> Any:
    """Return a value of a template with what the function returns for each text and key in it."""
    if isinstance(value, str):
        return function(value, is_of_others)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        if value.get("type") == "image" and isinstance(value.get("image"), ImageInput):
            return {"type": "image"}
        return {
            function(str(key), is_of_others): _convert(item, function, is_of_others=is_of_others)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_convert(item, function, is_of_others=is_of_others) for item in value]
    return function(str(value), is_of_others)


def template_tags(template: Any) -> set[str]:
    """Return the names of the tags that a chat template, or one of several, writes as text."""
    sources = template.values() if isinstance(template, Mapping) else (template or "",)
    return {name for source in sources for name in _TEMPLATE_TAG.findall(str(source))}


def tag_pattern(names: Collection[str]) -> re.Pattern[str]:
    """Match the first character of tags with these names."""
    if not names:
        return re.compile(r"(?!)")
    tags = "|".join(map(re.escape, sorted(names)))
    return re.compile(rf"<(?=/?(?:{tags})(?:[\s=/>]|\Z))")


def replace_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, which a tool may print but no tokenizer accepts, by `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")
