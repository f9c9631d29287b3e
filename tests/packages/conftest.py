"""Installs packages of others, each into an environment of its own, and prints what was tried."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from tests.rollout.gateway.conftest import codec, pytest_asyncio_loop_factories

__all__ = ["codec", "pytest_asyncio_loop_factories"]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "build" / "packages"
_INSTALL_TIMEOUT_S = 900
_rows: list[dict[str, str]] = []


@pytest.fixture
def package(record_property):
    """Installs a package and notes what is tried with it."""

    def prepare(name, *requirements, tried):
        record_property("package", name)
        record_property("tried", tried)
        requirements = requirements or (name,)
        python = _environment(name, requirements)
        record_property("version", _version(python, name))
        record_property("beside", _changes(requirements))
        return python

    return prepare


@pytest.fixture
def npm_package(record_property):
    """Installs a package of npm and notes what is tried with it; returns its folder."""

    def prepare(name, *, tried):
        record_property("package", name)
        record_property("tried", tried)
        record_property("beside", "not of Python")
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        folder = ENVIRONMENTS / name.rpartition("/")[2]
        folder.mkdir(parents=True, exist_ok=True)
        installed = folder / "node_modules" / name
        if not installed.is_dir():
            _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), name])
        manifest = json.loads((installed / "package.json").read_text(encoding="utf-8"))
        record_property("version", manifest["version"])
        return installed

    return prepare


def _environment(name, requirements):
    """Return the interpreter of an environment that has the requirements."""
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "requirements.json"
    wanted = json.dumps(requirements)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", *requirements])
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command):
    """Run an installer; the reason why it fails is the result of the test."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        pytest.skip(f"cannot be installed: {(errors or ['no reason'])[-1][:200]}")


def _version(python, name):
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def _changes(requirements):
    """Return what an installation into the trainer's environment would replace, as a cell."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    requirements = [item for item in requirements if not item.startswith("--")]
    done = subprocess.run(
        [*command, *requirements], capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
    )
    if done.returncode:
        return "cannot be installed"
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    listing = [sys.executable, "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(listing, capture_output=True, text=True).stdout)
    installed = {item["name"].lower().replace("_", "-"): item["version"] for item in listed}
    replaced = [
        f"{item['name']} {installed[name]} -> {item['version']}"
        for item in found
        if (name := item["name"].lower().replace("_", "-")) in installed
    ]
    return f"replaces {', '.join(replaced)}" if replaced else f"safe, adds {len(found)}"


def pytest_configure(config):
    """Declare the marker; the tests run only where the command line names it."""
    config.addinivalue_line("markers", "packages: installs a package and runs a session with it")


def pytest_collection_modifyitems(config, items):
    """Leave the tests of this folder out unless `-m packages` asks for them."""
    if config.option.markexpr != "packages":
        folder = Path(__file__).parent
        left_out = [item for item in items if folder in item.path.parents]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report):
    """Keep a row of the table for each test that has installed something, or tried to."""
    row = dict(report.user_properties)
    if report.when == "call" and "package" in row:
        result = {"passed": "works", "failed": "fails"}.get(report.outcome, "")
        row["result"] = result or str(report.longrepr[2]).removeprefix("Skipped: ")
        _rows.append(row | {"seconds": f"{report.duration:.0f}"})


def pytest_terminal_summary(terminalreporter):
    """Print the table."""
    if not _rows:
        return
    terminalreporter.section(f"packages, {date.today()}")
    head = ("package", "version", "what was tried", "result", "seconds", "beside the trainer")
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for row in _rows:
        keys = ("package", "version", "tried", "result", "seconds", "beside")
        lines.append(" | ".join(row.get(key, "") for key in keys))
    for line in lines:
        terminalreporter.write_line(f"| {line} |")
