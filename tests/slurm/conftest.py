"""Fixtures: a Slurm cluster of two virtual nodes, and jobs on it."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.slurm.virtual_cluster import NODES, VirtualCluster, live_processes, unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
# By default Ray reserves 30 % of the memory for objects, on each node.
RAY_OPTIONS = "--object-store-memory=100000000"


@pytest.fixture(scope="session")
def running_slurm():
    """Start the cluster once; skip the tests if Slurm is not installed."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    # Not pytest's folder, because the paths of Unix sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = VirtualCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


class Jobs:
    """Jobs of one test. `marker` is in the environment of all their processes."""

    def __init__(self, slurm, folder, marker):
        self.slurm = slurm
        self.folder = folder
        self.marker = marker
        self.output = folder / "job.out"
        self.run_dir = folder / "runs" / "mine"

    def beside(self, name):
        """Return further jobs of the same test with a separate output and run folder."""
        folder = self.folder / name
        folder.mkdir()
        return Jobs(self.slurm, folder, self.marker)

    def submit(self, *words, driver=None, script="slurm/train.sh", nodes=2, options=(), **more):
        """Submit a job with the environment variables `more`; return its id."""
        environment = {
            **self.slurm.environment,
            "MEGA_AGENTRL_LOCAL_DIR": self.marker,
            "MEGA_AGENTRL_RAY_OPTIONS": RAY_OPTIONS,
            **more,
        }
        if driver:
            environment["MEGA_AGENTRL_DRIVER"] = driver
        line = ["sbatch", "--parsable", f"-N{nodes}", f"--output={self.output}", *options]
        completed = self.slurm.command(*line, script, *words, env=environment, cwd=ROOT)
        return completed.stdout.strip()

    def tiny(self, do, **more):
        """Submit a job with the tiny driver, on a Ray without the features it does not need."""
        driver = f"python {ROOT}/tests/slurm/tiny_driver.py"
        more = {
            "MEGA_AGENTRL_RAY_OPTIONS": f"{RAY_OPTIONS} --include-log-monitor=false",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
        } | more
        return self.submit(f"run_dir={self.run_dir}", f"do={do}", driver=driver, **more)

    def wait_for(self, path, timeout_s):
        self.slurm.wait_for(path.exists, timeout_s, f"{path.name}", self.output)

    def end(self, job, timeout_s):
        """Wait for the end of a job; return exit code and output."""
        code = self.slurm.wait_ended(job, timeout_s, self.output)
        return code, self.output.read_text()

    def left_over(self):
        """Return pid and command of the jobs' live processes, and their folders.

        Compiled kernels are kept for the next job (`slurm/env.sh`).
        """
        processes = [(pid, command) for pid, _, command, _ in live_processes(self.marker)]
        folders = [str(path) for path in Path(self.marker).iterdir()]
        return processes + [path for path in folders if "/mega_agentrl-kernels-" not in path]


@pytest.fixture
def jobs(running_slurm, tmp_path):
    """Jobs of a test, which fails if they leave processes or files on the nodes."""
    marker = tempfile.mkdtemp(prefix="jobs-")
    jobs = Jobs(running_slurm, tmp_path, marker)
    try:
        yield jobs
        running_slurm.command("scancel", "--user=root")
        running_slurm.wait_for(
            lambda: running_slurm.node_states() == ["idle"] * len(NODES), 240, "idle nodes"
        )
        deadline_s = time.monotonic() + 120
        while (remaining := jobs.left_over()) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        assert not remaining, remaining
    finally:
        running_slurm.command("scancel", "--user=root", check=False)
        shutil.rmtree(marker, ignore_errors=True)
