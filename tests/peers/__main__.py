"""`python -m tests.peers FOLDER`: compare with the packages that are installed in FOLDER.

Each module of comparisons runs in a process of its own, because it replaces modules and puts FOLDER
before the installed packages. Prints one table; exits with 1 if a difference has no reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

from tests.peers.absent_modules import stand_in_for
from tests.peers.comparison import Outcome, compare


@dataclass(frozen=True, slots=True)
class Peer:
    """What a module of comparisons needs."""

    distribution: str
    """The package that it compares with."""
    absent: str
    """Modules that this package imports and that what is compared does without."""


_LARGE = "ray vllm deepspeed tensordict peft accelerate datasets"
_BFCL_ABSENT = (
    "tree_sitter tree_sitter_java tree_sitter_javascript overrides cohere google mistralai boto3 "
    "qwen_agent writerai datamodel_code_generator"
)
MODULES = {
    "verl_algorithms": Peer("verl", f"{_LARGE} codetiming orjson"),
    "verl_data": Peer("verl", f"{_LARGE} codetiming orjson"),
    "openrlhf_algorithms": Peer("openrlhf", f"{_LARGE} pylatexenc flash_attn torchdata"),
    "trl_algorithms": Peer("trl", f"{_LARGE} wandb trackio"),
    "trl_rewards": Peer("trl", ""),
    "math_verify_answers": Peer("math-verify", ""),
    "bfcl_verdicts": Peer("bfcl_eval", _BFCL_ABSENT),
}
PROCESS_TIMEOUT_S = 1800


def main() -> int:
    """Compare, print the table and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the peers are installed")
    parser.add_argument("--inputs", type=int, default=400, help="random inputs of a comparison")
    parser.add_argument("--only", choices=MODULES, help="one module of comparisons")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # of a child
    arguments = parser.parse_args()
    if arguments.results is not None:
        return _run_child(arguments)
    return _run_all(arguments)


def _run_child(arguments: argparse.Namespace) -> int:
    """Run one module of comparisons, and write their outcomes as JSON."""
    stand_in_for(MODULES[arguments.only].absent.split())
    sys.path.insert(1, str(arguments.folder.resolve()))
    module = importlib.import_module(f"tests.peers.{arguments.only}")
    outcomes = [asdict(compare(one)) for one in module.comparisons(arguments.inputs)]
    arguments.results.write_text(json.dumps(outcomes))
    return 0


def _run_all(arguments: argparse.Namespace) -> int:
    versions = {
        one.metadata["Name"]: one.version for one in distributions(path=[str(arguments.folder)])
    }
    rows, failures = [], []
    for module in [arguments.only] if arguments.only else MODULES:
        peer = MODULES[module].distribution
        outcomes, error = _outcomes(module, arguments)
        if error:
            failures.append(f"{module}: {error}")
        for outcome in outcomes:
            rows.append((peer, versions.get(peer, "missing"), outcome))
            failures += [f"{peer}: {outcome.function}: {line}" for line in outcome.failures]
    _print_table(rows)
    for line in failures:
        print(f"FAILED {line}")
    total = sum(outcome.num_inputs for _, _, outcome in rows)
    print(f"{len(rows)} functions, {total} inputs, {len(failures)} failures")
    return 1 if failures or not rows else 0


def _outcomes(module: str, arguments: argparse.Namespace) -> tuple[list[Outcome], str]:
    """Return the outcomes of a module's process, and why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "tests.peers", str(arguments.folder), "--only", module]
        command += ["--inputs", str(arguments.inputs), "--results", str(results)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PROCESS_TIMEOUT_S
        )
        if done.returncode or not results.exists():
            return [], f"exit {done.returncode}: {done.stderr[-2000:]}"
        return [Outcome(**one) for one in json.loads(results.read_text())], ""


def _print_table(rows: list[tuple[str, str, Outcome]]) -> None:
    print("| peer | version | function | inputs | differences | reason |")
    print("| --- | --- | --- | --- | --- | --- |")
    for peer, version, outcome in rows:
        count = sum(outcome.explained.values()) + outcome.unexplained
        reasons = [f"{text} ({number})" for text, number in outcome.explained.items()]
        if outcome.unexplained:
            reasons.append(f"NONE ({outcome.unexplained})")
        cells = (peer, version, outcome.function, outcome.num_inputs, count, "; ".join(reasons))
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    sys.exit(main())
