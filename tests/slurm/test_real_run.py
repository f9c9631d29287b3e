"""Real runs on nodes with addresses of their own: over both, requeued, and as a job array."""

import json
import math
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.overrides import asset_overrides
from tests.slurm.virtual_cluster import ENDED, live_processes

pytestmark = pytest.mark.slurm

RUN_S = 540
SMALL = [
    "experiment=smoke_ci",
    "sft.max_steps=2",
    "data.prompts_per_step=4",
    "evaluate.num_questions=2",
]
TWO_STAGES = ["parallel.tensor=1", "parallel.pipeline=2", "parallel.data=2"]


def actors_and_nodes(marker):
    """Iterate over the Ray actors of this test's jobs: class and node."""
    for _, _, command, environment in live_processes(marker):
        node = re.search(r"MEGA_AGENTRL_NODE_TAG=\S*?(n\d) ", environment)
        actor_class = re.match(r"ray::(\w+Actor)\b", command)
        if node and actor_class:
            yield actor_class.group(1), node.group(1)


def bytes_by_transport(run_dir):
    """Return the bytes of a weight update by transport, which the run has written down."""
    text = (run_dir / "logs" / "weights.txt").read_text()
    return {name: int(count) for name, count in re.findall(r"by (\w+): (\d+) bytes", text)}


def model_bytes(assets):
    """Return the bytes of all weights of the model in float32."""
    total = 0
    for path in Path(assets, "model").glob("*.safetensors"):
        with safe_open(path, framework="numpy") as tensors:
            shapes = (tensors.get_slice(name).get_shape() for name in tensors.keys())
            total += sum(4 * math.prod(shape) for shape in shapes)
    return total


def steps_of(run_dir):
    """Return the RL steps that the run has written down, without a line that it is writing."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    return [row["step"] for row in map(json.loads, lines) if row["stage"] == "rl"]


def test_groups_and_weights_cross_the_network(jobs, assets):
    """Four policy ranks, in two pipelines and two data ranks, do not fit into a node of three CPUs.

    The engine shares one node with at most two of them. What it needs from the other node's ranks
    travels by gloo, over interfaces that the node's host name does not resolve to.
    """
    arguments = [*SMALL, *TWO_STAGES, "total_steps=1", *asset_overrides(assets, jobs.run_dir)]
    job = jobs.submit(*arguments)
    nodes_by_class = {}

    def has_ended():
        for actor_class, node in actors_and_nodes(jobs.marker):
            nodes_by_class.setdefault(actor_class, set()).add(node)
        return jobs.slurm.state(job) in ENDED

    jobs.slurm.wait_for(has_ended, RUN_S, f"end of job {job}", jobs.output)
    code, output = jobs.end(job, 60)
    assert code == 0, output[-3000:]
    assert nodes_by_class["PolicyActor"] == {"n1", "n2"}
    assert len(nodes_by_class["EngineActor"]) == 1
    summary = json.loads((jobs.run_dir / "summary.json").read_text())
    assert summary["num_steps"] == 1
    assert 0 <= summary["mismatch_mean_abs"] < 1e-3
    carried = bytes_by_transport(jobs.run_dir)
    assert carried["gloo"] > 0
    assert sum(carried.values()) == model_bytes(assets), carried
    driver_log = jobs.run_dir.parent / f"slurm-{job}" / "driver.log"
    assert "held-out reward after RL" in driver_log.read_text()


@pytest.mark.slow(200)
@pytest.mark.timeout(1200)
def test_requeued_trainer_resumes_on_both_nodes(jobs, assets):
    arguments = [*SMALL, *TWO_STAGES, "total_steps=40", *asset_overrides(assets, jobs.run_dir)]
    job = jobs.submit(*arguments)
    metrics = jobs.run_dir / "metrics.jsonl"
    jobs.slurm.wait_for(
        lambda: metrics.exists() and 2 in steps_of(jobs.run_dir), RUN_S, "step 2", jobs.output
    )
    jobs.slurm.command("scancel", "--batch", "--signal=USR1", job)
    jobs.slurm.wait_for(
        lambda: "is requeued and resumes" in jobs.output.read_text(), RUN_S, "requeue", jobs.output
    )
    num_done = max(steps_of(jobs.run_dir))
    assert 2 <= num_done < 40
    jobs.slurm.wait_for(
        lambda: num_done + 2 in steps_of(jobs.run_dir), RUN_S, "further steps", jobs.output
    )
    jobs.slurm.command("scancel", "--batch", "--signal=TERM", job)
    jobs.end(job, RUN_S)
    steps = steps_of(jobs.run_dir)
    assert steps == list(range(steps[0], steps[0] + len(steps))), "none is missing or done twice"
    assert bytes_by_transport(jobs.run_dir)["gloo"] > 0


@pytest.mark.slow(150)
def test_tasks_of_an_array_are_runs_of_their_own(jobs, assets):
    arguments = [
        *SMALL,
        "parallel=single",
        "total_steps=0",
        "sft.max_steps=0",
        "seed=${oc.env:SLURM_ARRAY_TASK_ID}",
        *asset_overrides(assets, f"{jobs.run_dir}-${{oc.env:SLURM_ARRAY_TASK_ID}}"),
    ]
    job = jobs.submit(*arguments, nodes=1, options=["--array=1-2"])
    for task in (1, 2):
        assert jobs.end(f"{job}_{task}", RUN_S)[0] == 0, jobs.output.read_text()[-3000:]
        run_dir = Path(f"{jobs.run_dir}-{task}")
        assert json.loads((run_dir / "summary.json").read_text())["seed"] == task
