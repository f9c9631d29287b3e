"""Measures which fraction of injected faults `make test` and `make test-all` find.

    python tools/mutation_check.py --out build/mutation.jsonl                  # 160 mutations
    python tools/mutation_check.py --out build/after.jsonl --again build/before.jsonl
    python tools/mutation_check.py --out build/drawn.jsonl --draw-only         # for a later --again

The product code is changed in one random place at a time: a condition is negated, a comparison or
an arithmetic operator is replaced, a number is changed, a statement is dropped. For each change the
tests that import the changed module run, nearest in the import graph first, until one fails: first
those of `make test`, for at most `--budget-s`, then those that only `make test-all` has, for at
most `--extended-budget-s`. A row of the result says in which circle of tests the fault was found.
A fault that no test finds within the budgets counts as not found, so both printed counts are lower
bounds.

`--again` repeats the mutations of an earlier result, so that two versions of the tests can be
compared on the same faults; `--draw-only` writes the mutations without running any test. A mutation
whose definition has since been changed is skipped and counted. The mutations are made in a copy of
the checkout.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

PACKAGE = "mega_agentrl"
CIRCLES = {
    "test": "not gpu and not slurm and not slow and not tools and not extended",
    "test-all": "not gpu and not slurm and not slow and not tools and extended",
}
"""Markers of the tests of `make test`, and of those that `make test-all` has beyond them."""
LIBRARIES = ("torch", "transformers", "pandas", "hypothesis", "hydra", "numba", "sympy", "httpx")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one place in the source."""

    path: str
    """File below the root of the repository."""
    definition: str
    """Source text of the enclosing top-level definition.

    With it the place is found again in a file that has changed elsewhere.
    """
    line: int
    """First line of the changed node, relative to the definition."""
    column: int
    """Column of the node's first character, in bytes."""
    kind: str
    before: str
    """Source text of the changed node."""
    after: str
    """Source text that replaces it."""


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_skipped(node: ast.AST) -> bool:
    """Return whether no change below the node could alter behaviour."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes whose change may alter behaviour, that is not annotations or messages."""
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list"}:
                continue
            children = value if isinstance(value, list) else [value]
            todo.extend(c for c in children if isinstance(c, ast.AST) and not _is_skipped(c))


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (kind of change, node that it replaces, new source text)."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _COMPARISONS[type(node.ops[0])]()
        changed = ast.Compare(node.left, [other], node.comparators)
        yield "comparison", node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        changed_op = ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        yield "operator", node, f"({ast.unparse(changed_op)})"
    elif isinstance(node, ast.Constant) and type(node.value) in {int, float}:
        yield "number", node, repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "boolean", node, repr(not node.value)
    elif isinstance(node, (ast.Expr, ast.AugAssign)) and not _is_docstring(node):
        yield "dropped statement", node, "pass"


def mutations_of(path: str, source: str) -> list[Mutation]:
    """Return all mutations of one file."""
    mutations = []
    for top in ast.parse(source).body:
        if _is_skipped(top) or _is_docstring(top):
            continue
        definition = ast.get_source_segment(source, top) or ""
        for node in _nodes(top):
            for kind, target, after in _replacements(node):
                before = ast.get_source_segment(source, target)
                if before is None:
                    continue
                mutations.append(
                    Mutation(
                        path=path,
                        definition=definition,
                        line=target.lineno - top.lineno,
                        column=target.col_offset,
                        kind=kind,
                        before=before,
                        after=after,
                    )
                )
    return mutations


def sample(root: Path, count: int, seed: int) -> list[Mutation]:
    """Draw about `count` mutations, in each package in proportion to its lines of code."""
    by_package: dict[str, list[Mutation]] = {}
    num_lines: dict[str, int] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root)
        package = relative.parts[1] if len(relative.parts) > 2 else ""
        source = path.read_text()
        by_package.setdefault(package, []).extend(mutations_of(str(relative), source))
        num_lines[package] = num_lines.get(package, 0) + len(source.splitlines())
    generator = random.Random(seed)
    total = sum(num_lines.values())
    chosen = []
    for package in sorted(by_package):
        share = min(len(by_package[package]), round(count * num_lines[package] / total))
        chosen += generator.sample(by_package[package], share)
    generator.shuffle(chosen)
    return chosen


def apply(mutation: Mutation, source: str) -> str | None:
    """Return the mutated source, or None if the definition has changed or is not unique."""
    if source.count(mutation.definition) != 1:
        return None
    start = source.index(mutation.definition)
    lines = mutation.definition.splitlines(keepends=True)
    start += sum(len(line) for line in lines[: mutation.line])
    start += len(lines[mutation.line].encode()[: mutation.column].decode())
    end = start + len(mutation.before)
    assert source[start:end] == mutation.before
    return source[:start] + mutation.after + source[end:]


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the names of the modules that import each module, tests and tools included.

    A module that calls `pkgutil.iter_modules(package.__path__)` imports the whole package.
    """
    files = [
        path.relative_to(root)
        for folder in (PACKAGE, "tests", "tools", "examples")
        for path in sorted((root / folder).rglob("*.py"))
    ]
    modules = {_module_of(path): path for path in files}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
                targets.append(node.module)
            elif isinstance(node, ast.Call) and (package := _listed_package(node)):
                targets = [other for other in modules if f".{package}." in other]
            else:
                continue
            for target in targets:
                if target in importers:
                    importers[target].add(name)
    return importers


def _listed_package(call: ast.Call) -> str | None:
    """Return `package` where a call is `iter_modules(package.__path__)`."""
    match call:
        case ast.Call(
            func=ast.Attribute(attr="iter_modules"),
            args=[ast.Attribute(value=ast.Name(id=package), attr="__path__"), *_],
        ):
            return package
    return None


def tests_of(module: str, importers: dict[str, set[str]]) -> list[str]:
    """Return the test files that import `module` directly or indirectly, nearest first.

    At equal distance, end-to-end tests are last, and names that resemble the module's are first.
    """
    distance = {module: 0}
    todo = deque([module])
    while todo:
        name = todo.popleft()
        for importer in importers.get(name, ()):
            if importer not in distance:
                distance[importer] = distance[name] + 1
                todo.append(importer)
    words = set(module.split("."))

    def rank(test: str) -> tuple[int, bool, int, str]:
        parts = test.split(".")
        return distance[test], "e2e" in parts, -len(words & set(parts)), test

    reached = [name for name in distance if name.rsplit(".", 1)[-1].startswith("test_")]
    return [name.replace(".", "/") + ".py" for name in sorted(reached, key=rank)]


def _run_tests(root: Path, files: list[str], markers: str, budget_s: float) -> tuple[str, str]:
    """Run the tests in a fork of this process, which has imported the slow libraries.

    Returns:
        ("found", first failure), ("missed", "") or, if the time ran out, ("budget", "").
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        child = multiprocessing.get_context("fork").Process(
            target=_pytest, args=(root, files, markers, output)
        )
        child.start()
        child.join(budget_s)
        if child.is_alive():
            # pytest ends the processes of its fixtures; all others of the group are killed.
            child.terminate()
            child.join(20)
            _kill_group(child.pid)
            child.join()
            return "budget", ""
        _kill_group(child.pid)
        text = output.read_text(errors="replace")
    if child.exitcode in {0, 5}:
        return "missed", ""
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "found", failed[0][:300] if failed else text[-300:]


def _pytest(root: Path, files: list[str], markers: str, output: Path) -> None:
    """Run the files in this process until the first failure, and exit with pytest's code."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(root)
    # The tree under test comes before an editable install of another checkout.
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-n0", "--no-header", "--tb=no"]
    code = pytest.main([*options, "-rfE", "-m", markers, *files])
    sys.stdout.flush()
    os._exit(int(code))


def _kill_group(pid: int | None) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid or 0, signal.SIGKILL)


def _import_libraries() -> None:
    """Import the libraries that most tests need, so that the forks need not import them."""
    sys.dont_write_bytecode = True
    for name in LIBRARIES:
        importlib.import_module(name)


def _copy_tree(source: Path, target: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=source, check=True, capture_output=True, timeout=60
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def _measure(
    mutation: Mutation,
    root: Path,
    importers: dict[str, set[str]],
    budgets_s: Mapping[str, float],
) -> dict[str, object]:
    """Return the row of a mutation: outcome, circle of the test that found it, test, seconds."""
    path = root / mutation.path
    source = path.read_text() if path.is_file() else ""
    changed = apply(mutation, source)
    if changed is None:
        return {"outcome": "changed", "circle": "", "by": "", "seconds": 0.0}
    files = tests_of(_module_of(Path(mutation.path)), importers)
    start_s = time.monotonic()
    row: dict[str, object] = {"outcome": "missed", "circle": "", "by": ""}
    path.write_text(changed)
    try:
        for circle, markers in CIRCLES.items() if files else ():
            outcome, by = _run_tests(root, files, markers, budgets_s[circle])
            if outcome == "found":
                row = {"outcome": outcome, "circle": circle, "by": by}
                break
            if outcome == "budget":
                row["outcome"] = outcome
    finally:
        path.write_text(source)
    return {**row, "seconds": round(time.monotonic() - start_s, 1)}


def main() -> None:
    """Draw or read the mutations, run the tests on each, and print how many were found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=150.0, help="of `make test`'s tests")
    parser.add_argument(
        "--extended-budget-s", type=float, default=150.0, help="of those only `make test-all` has"
    )
    parser.add_argument("--again", type=Path, help="result whose mutations are repeated")
    parser.add_argument("--draw-only", action="store_true", help="write the mutations, run nothing")
    parser.add_argument("--part", default="0/1", help="I/N: only mutations I, I+N, I+2N, ...")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    if args.again is None:
        mutations = sample(args.root, args.count, args.seed)
    else:
        rows = map(json.loads, args.again.read_text().splitlines())
        mutations = [Mutation(**row["mutation"]) for row in rows]
    first, step = map(int, args.part.split("/"))
    mutations = mutations[first::step]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.draw_only:
        rows_out = [json.dumps({"mutation": asdict(mutation)}) + "\n" for mutation in mutations]
        args.out.write_text("".join(rows_out))
        print(f"{len(mutations)} mutations drawn")
        return
    budgets_s = dict(zip(CIRCLES, (args.budget_s, args.extended_budget_s), strict=True))
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, args.out.open("w") as out:
        root = Path(folder)
        _copy_tree(args.root, root)
        importers = import_graph(root)
        _import_libraries()
        for mutation in mutations:
            result = _measure(mutation, root, importers, budgets_s)
            outcome = " by ".join(filter(None, (str(result["outcome"]), str(result["circle"]))))
            outcomes[outcome] += 1
            print(json.dumps({"mutation": asdict(mutation), **result}), file=out, flush=True)
            print(
                f"{outcome:17} {result['seconds']:6} s  {mutation.path}: {mutation.kind}",
                flush=True,
            )
    counted = outcomes.total() - outcomes["changed"]
    num_found = {circle: outcomes[f"found by {circle}"] for circle in CIRCLES}
    print(
        f"make test found {num_found['test']} of {counted}, make test-all "
        f"{sum(num_found.values())}: {dict(outcomes)}"
    )


if __name__ == "__main__":
    main()
