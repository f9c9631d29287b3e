"""Checks that pytest collects the same tests on every machine and in every process.

    python tools/check_collection.py    # exit code 1 and the first differences if they differ
    python tools/check_collection.py tests/algo    # only the tests below some paths

The tests are collected twice at the same time, under conditions that differ between machines and
workers of pytest-xdist: time of day, hash seed, locale, working directory, and the folder of the
checkout, whose files are created in another order. Both collections must have the same ids in the
same order. The check fails, for example, if an id contains the address of an object or depends on
the order of a set.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 240.0
MAX_SHOWN = 20
OFFSET_S = 100_000.0
"""How far the clock of the second collection is ahead: more than a day."""

# Shifts the clock, then collects. Arguments: seconds, then the arguments of pytest.
_COLLECT = """
import sys, time
offset_s = float(sys.argv[1])
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + offset_s
time.time_ns = lambda: now_ns() + int(offset_s * 1e9)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def copy_checkout(source: Path, target: Path) -> None:
    """Copy the files that git tracks or would track, in reversed order."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout.decode()
    for name in sorted(filter(None, names.split("\0")), reverse=True):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def start_collection(
    root: Path,
    working_directory: Path,
    paths: Sequence[str],
    *,
    offset_s: float,
    hash_seed: int,
    locale: str,
) -> subprocess.Popen[str]:
    """Start collecting the tests at some paths of the checkout at `root`."""
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    arguments += ["--strict-markers", "--import-mode=importlib", "-W", "ignore"]
    arguments += [f"--rootdir={root}", "-c", str(root / "pyproject.toml")]
    arguments += [str(root / path) for path in paths]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "LC_ALL": locale,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", _COLLECT, str(offset_s), *arguments],
        cwd=working_directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
    )


def collected_ids(child: subprocess.Popen[str]) -> list[str]:
    """Return the ids of the collected tests in order; raise `RuntimeError` if collecting failed."""
    try:
        output, _ = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        raise RuntimeError(
            f"collecting took more than {DEADLINE_S:g} s:\n{output[-2000:]}"
        ) from None
    if child.returncode != 0:
        raise RuntimeError(f"collecting failed with {child.returncode}:\n{output[-4000:]}")
    return [line for line in output.splitlines() if "::" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", default=["tests"], help="below the checkout")
    paths = parser.parse_args(arguments).paths
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "elsewhere"
        copy_checkout(ROOT, copy)
        original = start_collection(ROOT, ROOT, paths, offset_s=0.0, hash_seed=1, locale="C")
        copied = start_collection(
            copy, Path(folder), paths, offset_s=OFFSET_S, hash_seed=2, locale="C.UTF-8"
        )
        try:
            first, second = collected_ids(original), collected_ids(copied)
        finally:
            for child in (original, copied):
                child.kill()
                child.wait()
    # From another working directory, ids start with the path of the copy.
    second = [line[line.index("tests/") :] for line in second]
    if first == second:
        print(f"{len(first)} tests collected twice, the same")
        return 0
    changes = difflib.unified_diff(first, second, "first", "second", lineterm="", n=0)
    shown = [line for line in changes if not line.startswith("@@")][: MAX_SHOWN + 2]
    print("two collections of the same tests differ, so that pytest-xdist would refuse to run;")
    print("expected constant ids: pytest.param(..., id='...')")
    print("\n".join(shown))
    return 1


if __name__ == "__main__":
    sys.exit(main())
