"""Check that the pins of requirements/gpu.txt satisfy each other, without installing anything.

    python tools/check_gpu_lock.py                   Python 3.11 and 3.12; a few minutes each
    python tools/check_gpu_lock.py --python 3.12

pip reports the metadata of every pinned package for the given version of Python: from the index if
it has the metadata as files of their own, else from the wheels, which pip downloads and discards.
The requirements that apply on Linux with that version, from the extras `gpu`, `sweep` and `dev` of
pyproject.toml down, are compared with the pins. The exit code is 1 if a requirement is not met, and
2 if pip has found no package for a pin.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "gpu.txt"
EXTRAS = ("gpu", "sweep", "dev")
PYTHONS = ("3.11", "3.12")
PIP_TIMEOUT_S = 560


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Metadata of one pinned package."""

    version: str
    requires: Sequence[str] = ()
    """Requirements with their markers, as in the package's `Requires-Dist`."""
    requires_python: str = ""
    """Versions of Python that the package accepts."""


def marker_environment(python: str) -> dict[str, str]:
    """Return the values of all markers on Linux with a version of Python, such as 3.12."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def find_conflicts(
    packages: Mapping[str, Package], requirements: Sequence[str], python: str
) -> list[str]:
    """Return a sentence for each requirement that the pins do not meet.

    Args:
        packages: Pinned packages by canonical name.
        requirements: Requirements of the project itself.
        python: Version of Python that decides which requirements apply.
    """
    conflicts = [
        f"{name} {package.version} needs Python {package.requires_python}"
        for name, package in packages.items()
        if not SpecifierSet(package.requires_python).contains(f"{python}.0")
    ]
    visited: set[tuple[str, str]] = set()
    todo = [("the project", Requirement(line), "") for line in requirements]
    while todo:
        parent, requirement, extra = todo.pop()
        environment = marker_environment(python) | {"extra": extra}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        name = str(canonicalize_name(requirement.name))
        if name not in packages:
            conflicts.append(f"{parent} needs {requirement}, which is not pinned")
            continue
        package = packages[name]
        if not requirement.specifier.contains(package.version, prereleases=True):
            conflicts.append(f"{parent} needs {requirement}, but the pin is {package.version}")
        for wanted in {"", *requirement.extras} - {done for key, done in visited if key == name}:
            visited.add((name, wanted))
            label = f"{name} {package.version}"
            todo += [(label, Requirement(line), wanted) for line in package.requires]
    return sorted(set(conflicts))


def project_requirements() -> list[str]:
    """Return the requirements of `.[gpu,sweep,dev]` and of its build."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    extras = (line for extra in EXTRAS for line in project["optional-dependencies"][extra])
    return [*pyproject["build-system"]["requires"], *project["dependencies"], *extras]


def fetch_metadata(python: str) -> dict[str, Package]:
    """Return the metadata of every pin for a version of Python.

    Raises:
        RuntimeError: pip has failed, for example because a pin has no wheel for that version.
    """
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--python-version", python]
    options += ["--target", str(ROOT / "build" / "never-made")]  # which pip wants for that version
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as exact:
        # `==2.13.0` also accepts 2.13.0+cpu, a build with other requirements; `===` does not.
        exact.write(LOCK.read_text(encoding="utf-8").replace("==", "==="))
        exact.flush()
        completed = subprocess.run(
            [*command, "--quiet", "--report", "-", "-r", exact.name],
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
            check=False,
        )
    if completed.returncode:
        raise RuntimeError(completed.stderr.strip())
    return dict(_read_report(json.loads(completed.stdout)))


def _read_report(report: Mapping[str, Any]) -> Iterator[tuple[str, Package]]:
    """Yield name and metadata of each package in a report of `pip install --report`."""
    for item in report["install"]:
        metadata = item["metadata"]
        yield (
            str(canonicalize_name(metadata["name"])),
            Package(
                version=metadata["version"],
                requires=metadata.get("requires_dist", ()),
                requires_python=metadata.get("requires_python", ""),
            ),
        )


def main(arguments: Sequence[str]) -> int:
    """Print the conflicts for each version of Python; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", choices=PYTHONS, help="default: both")
    code = 0
    for python in parser.parse_args(arguments).python or PYTHONS:
        try:
            packages = fetch_metadata(python)
        except RuntimeError as error:
            print(f"Python {python}: pip failed: {error}", file=sys.stderr)
            return 2
        conflicts = find_conflicts(packages, project_requirements(), python)
        for conflict in conflicts:
            print(f"Python {python}: {conflict}")
        print(f"Python {python}: {len(packages)} packages, {len(conflicts)} conflicts")
        code = code or int(bool(conflicts))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
