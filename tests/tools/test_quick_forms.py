"""Every script under tools/ runs in a small form, as its users start it; benchmarks print lines.

The small forms are the only place where the scripts run whole; the figures mean nothing at these
sizes. What the functions of a script compute is tested in the other files of this folder.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.e2e.overrides import asset_overrides, make_task
from tools import bench_batch, bench_driver, mutation_check

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
DEADLINE_S = 900.0
"""Of a script that a minute suffices for on a quiet machine."""
KEYS = ("bench", "case", "unit", "ours", "baseline", "ratio")
SMALL_RUN = (
    "total_steps=2",
    "sft.max_steps=2",
    "data.prompts_per_step=2",
    "evaluate.num_questions=2",
    "parallel.tensor=1",
    "save_every_steps=1",
    "report.save_trees_every_steps=1",
)


@dataclass(frozen=True, kw_only=True)
class QuickForm:
    """A small invocation of a script."""

    script: str
    name: str = ""
    """Of one of several forms of the script."""
    arguments: tuple[str, ...]
    """Words of the command line; `{name}` is replaced by the value of the fixture `name`."""
    seconds: int
    """CPU seconds, about; `--part` balances by them."""
    unmeasured: str = ""
    """Pattern of the cases of a benchmark that may lack a figure."""
    check: Callable[[dict[str, dict]], None] | None = None
    """What else must hold for a benchmark's lines by case."""

    @property
    def is_bench(self) -> bool:
        """Whether standard output consists of the lines of a benchmark."""
        return self.script.startswith("bench_")


def form(script: str, *arguments: str, seconds: int, **options) -> QuickForm:
    return QuickForm(script=script, arguments=arguments, seconds=seconds, **options)


def check_reshard(lines):
    """A rollout rank is sent only its half of the model."""
    assert {line["unit"] for line in lines.values()} == {"s", "MiB", "share"}
    # 4 layers of 787,200 elements, 2 tables of 2,048 x 256 and a norm, in float32: each of two
    # ranks gets its half by our path, norms and headers aside.
    whole = lines["received/gloo/verl"]["baseline"]
    assert whole == pytest.approx((4 * 787_200 + 2 * 2048 * 256 + 256) * 4 / 2**20, rel=1e-4)
    assert lines["received/gloo/verl"]["ours"] == pytest.approx(whole / 2, rel=0.01)


def check_join(lines):
    """Two rollout ranks connect to four sources each; a mesh connects all eight ranks."""
    connections = lines["connections/8"]
    # gloo may connect a pair again where a connection takes long.
    assert 8 <= connections["ours"] < 2 * 8
    assert connections["baseline"] >= 8 * 7 / 2


def check_actor(lines):
    """Tokens per second are those of the step; there is no peak of a CPU."""
    steps, tokens, mfu, memory = lines.values()
    for side in ("ours", "baseline"):
        assert tokens[side] * steps[side] == pytest.approx(64, rel=1e-3)
    if not torch.cuda.is_available():
        assert mfu["ours"] is memory["ours"] is None


def check_rollout(lines):
    """Both loops complete every group and leave no task."""
    assert lines["stream/leaked"]["ours"] == lines["stream/leaked"]["baseline"] == 0
    assert lines["stream/sampled"]["ours"] > 0


def check_tree(lines):
    """Trees have fewer tokens than flat rows, and as many as under a dense mask."""
    flat, dense = lines["update/arpo/flat"], lines["update/arpo/dense"]
    assert flat["ours"] == dense["ours"]
    assert flat["tokens_ratio"] > 1.5 and dense["tokens_ratio"] == 1


def check_batch(lines):
    """Four data ranks get a quarter each; the baseline sends twice and unpickles three times."""
    assert tuple(lines) == bench_batch.CASES
    sent, received = lines["sent/step"], lines["received/rank"]
    assert received["ours"] == pytest.approx(sent["ours"] / 4, rel=1e-3)
    assert received["baseline"] == pytest.approx(3 * sent["baseline"] / (2 * 4), rel=1e-3)


def check_driver(lines):
    """The sum is that of its parts."""
    assert tuple(lines) == bench_driver.CASES
    *parts, together, _ = lines.values()
    assert together["ours"] == pytest.approx(sum(line["ours"] for line in parts), abs=0.003)


MODEL_AND_DATA = ("--model", "{assets}/model", "--data", "{assets}")
FORMS = (
    form("bench_actor.py", "--quick", seconds=15, unmeasured="m*", check=check_actor),
    form("bench_async.py", "--quick", *MODEL_AND_DATA, seconds=60),
    form("bench_batch.py", "--quick", seconds=4, check=check_batch),
    form("bench_credit.py", "--quick", seconds=10),
    form("bench_driver.py", "--quick", seconds=4, check=check_driver),
    form(
        "bench_gateway.py", "--quick", "--model", "{chat_model}", seconds=20,
        unmeasured="held/memory",
    ),
    form("bench_logprob.py", "--quick", seconds=25),
    form("bench_memory.py", "{finished_run}", seconds=3, unmeasured="*/libraries"),
    form("bench_neighbours.py", "--quick", seconds=6),
    form("bench_replay.py", "--quick", seconds=60),
    form("bench_reshard.py", "--quick", seconds=60, check=check_reshard),
    form("bench_reshard.py", "--join", "8", seconds=8, name="join", check=check_join),
    form(
        "bench_rollout.py", "--quick", *MODEL_AND_DATA, seconds=40, unmeasured="latency/mean",
        check=check_rollout,
    ),
    form("bench_sandbox.py", "--quick", seconds=30),
    form("bench_step_time.py", "--quick", *MODEL_AND_DATA, seconds=60),
    form("bench_tree.py", "--quick", seconds=40, check=check_tree),
    form("bench_workspace.py", "--quick", seconds=5),
    form("chaos.py", "--quick", "--out", "{tmp_path}/chaos", "{overrides}", seconds=150),
    form("compare_algos.py", "--quick", "--out", "{tmp_path}/out", "{overrides}", seconds=50),
    form("compare_runs.py", "{finished_run}", "--out", "{tmp_path}", seconds=2),
    form(
        "convert_data.py", "--source", "gsm8k", "--input", "{gsm8k_file}", "--output",
        "{tmp_path}/rows.parquet", seconds=5,
    ),
    form(
        "export_hf.py", "{finished_run}", "--model", "{assets}/model", "--out", "{tmp_path}/hf",
        seconds=15,
    ),
    form("find_mismatch.py", "{assets}/model", "--tokens", "16", seconds=40),
    form("make_config_reference.py", "--out", "{tmp_path}/configuration.md", seconds=5),
    form("make_tiny_model.py", "--out", "{tmp_path}", "--num-demonstrations", "20", seconds=10),
    form(
        "mutation_check.py", "--again", "{mutation_file}", "--out", "{tmp_path}/found.jsonl",
        "--budget-s", "120", "--extended-budget-s", "1", seconds=60,
    ),
    form(
        "mutation_check.py", "--draw-only", "--count", "20", "--out", "{tmp_path}/drawn.jsonl",
        seconds=20, name="draw-only",
    ),
    form("preflight.py", "--cpu", "experiment=smoke", "{overrides}", seconds=8),
    form("report.py", "{finished_run}", "--out", "{tmp_path}/page.html", seconds=5),
    form("show_tree.py", "{tree_file}", seconds=5),
    form("simulate_reshard.py", "--quick", seconds=12),
    form("soak.py", "--quick", "--model", "{chat_model}", seconds=60),
)  # fmt: skip
UNRUN = {
    "convert_verifiers.py": "needs the package verifiers, which is not in requirements/cpu.txt",
    "lock.sh": "asks a package index; tests/test_requirements.py runs it",
    "setup_env.sh": "makes the environment that this test runs in; test_setup_env has a copy do so",
}
"""Why a script has no small form; only its syntax and its help are tested."""


def list_scripts() -> set[str]:
    """Return the names of the programs in tools/; its other modules belong to one of them."""
    return {
        path.name
        for path in TOOLS.iterdir()
        if path.suffix == ".sh" or (path.suffix == ".py" and "__main__" in path.read_text())
    }


def run_script(script: str, arguments: list[str], folder: Path) -> str:
    """Run a script to its end from another folder, and return its standard output.

    Output goes to files, because a process that outlives the script would keep a pipe open.
    """
    program = ["bash"] if script.endswith(".sh") else [sys.executable, "-W", "ignore"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out, err = folder / "script.out", folder / "script.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            [*program, str(TOOLS / script), *arguments],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(DEADLINE_S)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    assert code == 0, f"{out.read_text()[-2000:]}\n{err.read_text()[-4000:]}"
    return out.read_text()


# ---- inputs ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def finished_run(assets, tmp_path_factory):
    """Folder of the smallest run with checkpoints, trees and metrics."""
    folder = tmp_path_factory.mktemp("run") / "run"
    arguments = ["experiment=smoke_ci", *asset_overrides(assets, folder), *SMALL_RUN]
    done = subprocess.run(
        [sys.executable, "-m", "mega_agentrl", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    sizes = ("--num-train=9", "--num-dev=3", "--num-validation=3", "--num-demonstrations=20")
    make_task("toolqa_chat", folder, *sizes)
    return folder / "model"


@pytest.fixture
def overrides(assets):
    """Overrides for model and data, without a run folder."""
    return [one for one in asset_overrides(assets, "") if not one.startswith("run_dir=")]


@pytest.fixture
def tree_file(finished_run):
    return sorted((finished_run / "rollouts").glob("*.jsonl"))[0]


@pytest.fixture
def gsm8k_file(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    return path


@pytest.fixture
def mutation_file(tmp_path):
    """A row with a fault that the tests of its module find."""
    path = "mega_agentrl/algo/aepo.py"
    mutations = mutation_check.mutations_of(path, (ROOT / path).read_text())
    mutation = next(one for one in mutations if one.kind == "operator")
    (tmp_path / "drawn.jsonl").write_text(json.dumps({"mutation": asdict(mutation)}) + "\n")
    return tmp_path / "drawn.jsonl"


def fill(word: str, request: pytest.FixtureRequest) -> list[str]:
    """Return the words that a word of a form stands for."""
    if not word.startswith("{"):
        return [word]
    name, rest = word[1:].split("}")
    value = request.getfixturevalue(name)
    return value if isinstance(value, list) else [f"{value}{rest}"]


# ---- tests -----------------------------------------------------------------------------------


def check_figures(line: dict, unmeasured: str) -> None:
    """A line has the six keys and finite figures, or lacks one where that is allowed."""
    assert tuple(line)[: len(KEYS)] == KEYS
    figures = [line["ours"], line["baseline"]]
    if fnmatchcase(line["case"], unmeasured):
        figures = [value for value in figures if value is not None]
    elif line["ours"]:
        figures.append(line["ratio"])
    assert all(math.isfinite(value) for value in figures), line


def test_every_script_has_a_small_form_or_a_reason():
    scripts = list_scripts()
    assert {one.script for one in FORMS} | UNRUN.keys() == scripts
    assert not {one.script for one in FORMS} & UNRUN.keys()


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    "quick",
    [
        pytest.param(
            one,
            id=" ".join(filter(None, (one.script, one.name))),
            marks=pytest.mark.tools(one.seconds),
        )
        for one in FORMS
    ],
)
def test_the_small_form_runs(quick, request, tmp_path):
    arguments = [word for one in quick.arguments for word in fill(one, request)]
    output = run_script(quick.script, arguments, tmp_path)
    if quick.is_bench:
        lines = [json.loads(text) for text in output.splitlines()]
        assert lines
        assert {line["bench"] for line in lines} == {Path(quick.script).stem.removeprefix("bench_")}
        for line in lines:
            check_figures(line, quick.unmeasured)
        if quick.check is not None:
            quick.check({line["case"]: line for line in lines})


@pytest.mark.tools(3)
@pytest.mark.parametrize("script", UNRUN)
def test_a_script_that_cannot_run_here_starts(script, tmp_path):
    if script.endswith(".sh"):
        subprocess.run(["bash", "-n", str(TOOLS / script)], check=True, timeout=300)
    else:
        assert run_script(script, ["--help"], tmp_path).startswith("usage:")
