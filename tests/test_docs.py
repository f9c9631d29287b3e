"""What the documentation names exists: messages and metrics of the guides, files of the map."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mega_agentrl.types.records import ToolStatus

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ("quick_start.md", "troubleshooting.md")
ERRORS = ("ConfigError", "InputError")
MAP = ROOT / "docs" / "where_things_are.md"


def shown_text(node):
    """The text of a string, with dots for formatted values; dots alone for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", "...") for part in node.values]
        return "".join(one if isinstance(one, str) else "..." for one in parts)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else "..."


def error_message(call):
    """The message of an `InputError` or `ConfigError`, with dots for what is not literal."""
    fields = ("name", "got", "expected", "cause")
    given = dict(zip(fields, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords}
    name, expected, cause = (
        shown_text(given[field]) if field in given else "..." for field in fields if field != "got"
    )
    start = f"{name}=...:" if call.func.id == "ConfigError" else f"{name}: got ...,"
    return f"{start} expected {expected}; probable cause: {cause}"


@cache
def texts():
    """Every string, `InputError` and `ConfigError` of the package, one per line."""
    found = []
    for path in sorted((ROOT / "mega_agentrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
                found.append(error_message(node))
            elif isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(shown_text(node))
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


def test_files_of_the_map_exist():
    named = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|\w+\.(?:py|toml))`", MAP.read_text())
    places = (ROOT, ROOT / "mega_agentrl")
    missing = {
        path
        for path in named
        if "NAME" not in path and not any((place / path).exists() for place in places)
    }
    assert len(set(named)) > 50 and not missing


def test_names_of_the_map_exist():
    named = set(re.findall(r"`@?([A-Za-z_]\w+)[`(]", MAP.read_text()))
    folders = ("mega_agentrl", "configs", "slurm", "tests/parallel", "tests/tiny_models.py")
    files = [ROOT / "pyproject.toml"]
    for folder in (ROOT / name for name in folders):
        files += [folder] if folder.is_file() else folder.rglob("*.*")
    words = set()
    for path in files:
        if path.suffix in (".py", ".yaml", ".sh", ".toml"):
            words.update(re.findall(r"\w+", path.read_text()))
    assert len(named) > 30 and not named - words
