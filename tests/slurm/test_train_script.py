"""slurm/train.sh on a Slurm of two nodes: complete, interrupted, and with a lost node.

Most tests use a tiny driver (`tiny_driver.py`), because they test the shell script around it.
"""

import json
import os
import re
import shutil
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.slurm.virtual_cluster import CPUS_PER_NODE, NODES, live_processes

pytestmark = pytest.mark.slurm

START_S = 480  # Ray on two nodes takes about 20 s on an idle machine
LOST = 69


def parent(pid):
    status = Path(f"/proc/{pid}/stat").read_text()
    return int(status.rsplit(")", 1)[1].split()[1])


def test_invalid_input_ends_the_job_before_ray_starts(jobs):
    job = jobs.submit("experiment=smoke_ci", "optm.lr=1")
    code, output = jobs.end(job, START_S)
    assert code == 2
    assert "optm.lr" in output and "optim.lr" in output
    assert "head" not in output


def test_usr1_always_requeues_and_lost_processes_up_to_a_limit(jobs, tmp_path):
    """Three starts: the driver exits with 75, after USR1, and with 75 once too often.

    Ray needs two attempts in the first one.
    """
    root = root_with_ray_that_fails(tmp_path, "n1", 1)
    job = jobs.tiny("end-75,hold,end-75", MEGA_AGENTRL_MAX_LOST="1", MEGA_AGENTRL_ROOT=root)
    jobs.wait_for(jobs.run_dir / "start-1.json", START_S)
    report = json.loads((jobs.run_dir / "start-0.json").read_text())
    assert report["nodes"] == {"n1": True, "n2": True}
    assert report["cpus"] == len(NODES) * CPUS_PER_NODE
    jobs.slurm.command("scancel", "--batch", "--signal=USR1", job)
    jobs.wait_for(jobs.run_dir / "start-2.json", START_S)
    code, output = jobs.end(job, START_S)
    assert code == 1, output
    assert (jobs.run_dir / "saved").read_text() == "1"
    assert output.count("USR1: the driver saves and ends") == 1
    assert output.count("is requeued and resumes") == 2
    assert "has already restarted 1 times for that reason" in output
    job_info = jobs.slurm.command("scontrol", "show", "job", job).stdout
    assert "Restarts=2" in job_info
    assert "went away" not in output
    logs = jobs.run_dir.parent / f"slurm-{job}"
    expected = {"driver.log", "ray-n1.log", "ray-n2.log", "lost"}
    assert {path.name for path in logs.iterdir()} == expected
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    assert (logs / "ray-n1.log").read_text().count("too slow") == 1
    assert not (jobs.run_dir / "start-3.json").exists()


def test_lost_node_is_named(jobs):
    # Make Ray's head check its nodes more often, and shorten the wait for the lost one.
    more = {"RAY_health_check_period_ms": "1000", "MEGA_AGENTRL_STOP_DEADLINE_S": "10"}
    job = jobs.tiny("hold", **more)
    jobs.wait_for(jobs.run_dir / "start-0.json", START_S)
    slurm = jobs.slurm
    try:
        # All at once, like a power failure; Slurm itself would notice after a minute.
        (script,) = [
            pid
            for pid, name, command, _ in live_processes(jobs.marker)
            if "bash" in name and "ray_node.sh n2" in command
        ]
        step = parent(script)
        slurm.stop_daemon("n2", signal.SIGKILL)
        on_node = [pid for pid, *_ in live_processes(f"MEGA_AGENTRL_NODE_TAG={job}-0-n2")]
        for pid in [step, script, *on_node]:
            with suppress(ProcessLookupError):  # one may end with another
                os.kill(pid, signal.SIGKILL)
        slurm.wait_for(
            lambda: "went away" in jobs.output.read_text(), START_S, "message", jobs.output
        )
    finally:
        if "n2" not in slurm.daemons:
            slurm.start_node("n2")
    code, output = jobs.end(job, START_S)
    assert code == LOST, output
    assert [line for line in output.splitlines() if "went away" in line and "node n2" in line]
    assert "node n1" not in output
    # No process was left on n2 to remove it; a returning node uses another folder.
    shutil.rmtree(Path(jobs.marker) / f"ray-{job}-0-1")


def test_missing_node_is_named_at_the_deadline(jobs):
    slurm = jobs.slurm
    daemon = slurm.node_pid("n2")
    os.kill(daemon, signal.SIGSTOP)
    try:
        job = jobs.tiny("end-0", MEGA_AGENTRL_START_DEADLINE_S="8")
        slurm.wait_for(
            lambda: (
                jobs.output.exists() and "n2" in jobs.output.read_text().partition("logs in")[2]
            ),
            START_S,
            "message",
            jobs.output,
        )
    finally:
        # `nsenter` stops with its child and does not notice that the child goes on.
        for pid in (daemon, slurm.daemons["n2"].pid):
            os.kill(pid, signal.SIGCONT)
    code, output = jobs.end(job, START_S)
    assert code == LOST, output
    # On a slow machine Ray has not started on n1 by then either.
    assert re.search(r"missing after 8 s: node (n1, )?n2;|node n2 went away", output), output
    assert not jobs.run_dir.exists()


def root_with_ray_that_fails(folder, node, times):
    """Return a linked copy of the repository where `ray start` on the node fails `times` times."""
    root, here = folder / "root", Path(__file__).parents[2]
    (root / "slurm").mkdir(parents=True)
    for path in (*here.iterdir(), *(here / "slurm").iterdir()):
        if path.name not in ("slurm", "env.sh"):
            (root / path.relative_to(here)).symlink_to(path)
    wrapper = root / "programs" / "ray"
    wrapper.parent.mkdir()
    wrapper.write_text(
        "#!/bin/bash\n"
        f'if [[ "$*" == *--node-name={node}* ]] && [ "$(cat {root}/tries | wc -l)" -lt {times} ]\n'
        f"then echo again >>{root}/tries; echo too slow; exit 3; fi\n"
        f'exec {Path(sys.executable).parent}/ray "$@"\n'
    )
    wrapper.chmod(0o755)
    (root / "tries").touch()
    (root / "slurm" / "env.sh").write_text(
        f"source {here}/slurm/env.sh\nexport PATH={wrapper.parent}:$PATH\n"
    )
    return str(root)


def test_node_whose_ray_fails_three_times_is_named(jobs, tmp_path):
    root = root_with_ray_that_fails(tmp_path, "n2", 3)
    code, output = jobs.end(jobs.tiny("end-0", MEGA_AGENTRL_ROOT=root), START_S)
    assert code == LOST, output
    assert "node n2 went away" in output
    (log,) = jobs.run_dir.parent.glob("slurm-*/ray-n2.log")
    assert log.read_text().count("too slow") == 3


def test_term_reaches_only_the_driver_and_cancelled_jobs_leave_nothing(jobs):
    """Two jobs at once, one on each node.

    With `scancel --batch --signal=TERM` the driver ends while Ray still runs, and the job exits
    with its code. `scancel` ends everything.
    """
    other = jobs.beside("other")
    terminated, cancelled = (one.tiny("hold", nodes=1) for one in (jobs, other))
    jobs.wait_for(jobs.run_dir / "start-0.json", START_S)
    other.wait_for(other.run_dir / "start-0.json", START_S)
    jobs.slurm.command("scancel", "--batch", "--signal=TERM", terminated)
    code, output = jobs.end(terminated, START_S)
    assert code == 9, output
    assert "TERM: the driver is asked to end" in output
    assert "the driver ended with exit code 9" in output
    assert "went away" not in output
    assert jobs.slurm.state(cancelled) == "RUNNING"
    jobs.slurm.command("scancel", cancelled)
    jobs.slurm.wait_for(
        lambda: jobs.slurm.state(cancelled) == "CANCELLED", START_S, "end", other.output
    )
