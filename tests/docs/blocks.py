"""The fenced blocks of the documentation, and the commands in them.

A block names its file after its language, as in ```` ```python notes.py ````. A block without a
language holds commands or overrides. A block that cannot be tested follows a line
`<!-- not tested: REASON -->`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"(?:<!-- not tested: (.+) -->\n)?^```(\S*) ?(\S*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    number: int
    untested: str
    language: str
    file: str
    text: str

    @property
    def id(self):
        return f"{Path(self.page).stem}-{self.number}"


def read_blocks(page):
    found = _BLOCK.findall((ROOT / page).read_text())
    return [Block(page, number, *parts) for number, parts in enumerate(found, start=1)]


def commands(block):
    """The commands of a block, as words and without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def code_spans(page):
    """The inline code of a page, outside of its blocks."""
    return re.findall(r"`([^`\n]+)`", _BLOCK.sub("", (ROOT / page).read_text()))
