"""The smoke job over two nodes: policy ranks and engine on the Ray cluster of the allocation."""

import json
import re

import pytest

from tests.e2e.overrides import asset_overrides
from tests.slurm.virtual_cluster import ENDED, live_processes

pytestmark = pytest.mark.slurm


def actors_and_nodes(marker):
    """Iterate over class and node of the Ray actors of this test's jobs."""
    for _, _, command, environment in live_processes(marker):
        node = re.search(r"MEGA_AGENTRL_NODE_TAG=\S*?(n\d) ", environment)
        actor_class = re.match(r"ray::(\w+Actor)\b", command)
        if node and actor_class:
            yield actor_class.group(1), node.group(1)


def test_smoke_ci_by_sbatch(jobs, assets):
    job = jobs.submit(
        "experiment=smoke_ci",
        "total_steps=1",
        "sft.max_steps=2",
        "data.prompts_per_step=4",
        "evaluate.num_questions=2",
        *asset_overrides(assets, jobs.run_dir),
    )
    actors = set()

    def has_ended():
        actors.update(actors_and_nodes(jobs.marker))
        return jobs.slurm.state(job) in ENDED

    jobs.slurm.wait_for(has_ended, 480, f"end of job {job}", jobs.output)
    code, output = jobs.end(job, 10)
    assert code == 0, output[-3000:]
    nodes_by_class = {
        actor_class: {node for name, node in actors if name == actor_class}
        for actor_class, _ in actors
    }
    # A node has two cores, so the two policy ranks fill one node and the engine runs on the other.
    assert len(nodes_by_class["PolicyActor"]) == len(nodes_by_class["EngineActor"]) == 1
    assert nodes_by_class["PolicyActor"] | nodes_by_class["EngineActor"] == {"n1", "n2"}
    summary = json.loads((jobs.run_dir / "summary.json").read_text())
    assert summary["num_steps"] == 1
    assert 0 <= summary["mismatch_mean_abs"] < 1e-3
    driver_log = jobs.run_dir.parent / f"slurm-{job}" / "driver.log"
    assert "held-out reward after RL" in driver_log.read_text()
