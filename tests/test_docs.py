"""Messages and metrics in the guides occur in the package."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mega_agentrl.types.records import ToolStatus

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ("quick_start.md", "troubleshooting.md")


@cache
def texts():
    """Every string of the package, one per line, with dots for formatted values."""
    found = []
    for path in sorted((ROOT / "mega_agentrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "...") for part in node.values]
                found.append("".join(one if isinstance(one, str) else "..." for one in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def first_cells():
    """Code in the first cell of each table row, with the file."""
    for guide in GUIDES:
        for line in (ROOT / "docs" / guide).read_text().splitlines():
            if line.startswith("| `"):
                yield from (
                    (guide, code) for code in re.findall(r"`([^`]+)`", line.split(" | ")[0])
                )


METRICS = [one for one in first_cells() if re.fullmatch(r"[a-z]+(/[a-z_*]+)+", one[1])]
MESSAGES = [one for one in first_cells() if " " in one[1]]


@pytest.mark.parametrize(("guide", "metric"), METRICS)
def test_metrics_of_the_guides_are_in_the_package(guide, metric):
    name = metric.rpartition("/")[2]
    counted = name.startswith("num_") and name.removeprefix("num_") in set(ToolStatus)
    assert name in texts() or counted, f"{guide}: no text of the package has {name}"


@pytest.mark.parametrize(("guide", "message"), MESSAGES)
def test_messages_of_the_guides_are_in_the_package(guide, message):
    pieces = [piece.strip() for piece in message.split("...")]
    missing = [piece for piece in pieces if len(piece) > 3 and piece not in texts()]
    assert not missing, f"{guide}: no text of the package has {missing}"
