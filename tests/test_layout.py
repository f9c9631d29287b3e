"""Limits on the repository: short functions, specific names, nothing unfinished; no exceptions."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mega_agentrl"
TESTS = ROOT / "tests"
MAX_FUNCTION_LINES = 80
AIM_FUNCTION_LINES = 40
SHARE_ABOVE_AIM = 0.05
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
ALL_FILES = sorted([*SOURCES, *TESTS.rglob("*.py"), *(ROOT / "tools").rglob("*.py")])


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    """The tree of a file; not cached: a thousand living trees slow garbage collection down."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node; expressions, the most of a tree, hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(child)


@cache
def functions(path: Path) -> list[tuple[str, int]]:
    """Name and number of lines, decorators left out, of every function in a file."""
    return [
        (f"{shown(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for node in statements(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_functions_are_short():
    lengths = [found for path in ALL_FILES for found in functions(path)]
    long = [f"{name} ({length})" for name, length in lengths if length > MAX_FUNCTION_LINES]
    assert not long, f"more than {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_functions_above_the_aim_are_rare():
    lengths = [found for path in SOURCES for found in functions(path)]
    above = sorted(
        ((length, name) for name, length in lengths if length > AIM_FUNCTION_LINES), reverse=True
    )
    assert len(above) <= SHARE_ABOVE_AIM * len(lengths), (
        f"{len(above)} of {len(lengths)} functions are above {AIM_FUNCTION_LINES} lines:\n"
        + "\n".join(f"{length} {name}" for length, name in above)
    )


def test_no_module_has_a_vague_name():
    vague = [
        shown(path)
        for path in [*SOURCES, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
        if path.stem in VAGUE_NAMES
    ]
    assert not vague, ", ".join(vague)


def test_init_files_hold_a_docstring_or_declare_public_names():
    full = [
        shown(path)
        for path in PACKAGE.rglob("__init__.py")
        if len(parsed(path).body) != 1 and "__all__ = " not in path.read_text(encoding="utf-8")
    ]
    assert not full, ", ".join(full)


def test_every_package_folder_has_an_init_file():
    bare = {shown(path.parent) for path in SOURCES if not (path.parent / "__init__.py").is_file()}
    assert not bare, ", ".join(sorted(bare))


def test_tests_are_no_packages():
    assert not list(TESTS.rglob("__init__.py"))


def test_nothing_is_left_unfinished():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError|NotImplemented)\b")
    left = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in [*SOURCES, *(ROOT / "tools").rglob("*.py")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert not left, "\n".join(left)


def test_the_package_is_this_checkout():
    spec = importlib.util.find_spec("mega_agentrl")
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).resolve().parent == PACKAGE
