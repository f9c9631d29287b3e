"""Jobs whose programs run in a container: by a stand-in for pyxis, and the command of Apptainer.

The image is a folder with this machine's /usr and environment. `MEGA_AGENTRL_TEST_IMAGE` names
another one, for example the unpacked image of containers/Dockerfile.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.overrides import asset_overrides
from tests.slurm.test_preflight_script import rows
from tests.slurm.test_real_run import RUN_S, SMALL
from tests.slurm.test_train_script import START_S
from tests.slurm.virtual_cluster import live_processes

ROOT = Path(__file__).resolve().parents[2]
PYXIS = Path(__file__).with_name("pyxis")


def make_image(folder):
    """Make an image whose packages are this machine's; return what it has to mount."""
    for name in ("proc", "sys", "dev", "tmp", "run", "usr", "root"):
        (folder / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    etc = folder / "etc"
    etc.mkdir()
    shutil.copy("/etc/ld.so.cache", etc)
    (etc / "environment").write_text(f"PATH={sys.prefix}/bin:/usr/bin:/bin\n")
    (etc / "image").touch()
    return ["/usr", sys.prefix, *([] if sys.base_prefix.startswith("/usr") else [sys.base_prefix])]


@pytest.fixture
def container(jobs, tmp_path):
    """Return the variables of a job that runs in a container."""
    image, folders = os.environ.get("MEGA_AGENTRL_TEST_IMAGE"), []
    if image is None:
        image = tmp_path / "image"
        image.mkdir()
        folders = make_image(image)
    return {
        "PATH": f"{PYXIS}:{jobs.slurm.environment['PATH']}",
        "MEGA_AGENTRL_CONTAINER": str(image),
        "MEGA_AGENTRL_CONTAINER_MOUNTS": ",".join(f"{f}:{f}" for f in [*folders, tmp_path]),
    }


@pytest.mark.slurm
def test_driver_and_ray_run_in_the_container_and_get_signals(jobs, container):
    job = jobs.tiny("hold,hold", **container)
    jobs.wait_for(jobs.run_dir / "start-0.json", START_S)
    report = json.loads((jobs.run_dir / "start-0.json").read_text())
    assert report["nodes"] == {"n1": True, "n2": True}
    assert report["image"]
    raylets = [pid for pid, name, *_ in live_processes(jobs.marker) if name == "raylet"]
    assert len(raylets) == 2
    assert all(Path(f"/proc/{pid}/root/etc/image").is_file() for pid in raylets)
    jobs.slurm.command("scancel", "--batch", "--signal=USR1", job)
    jobs.wait_for(jobs.run_dir / "start-1.json", START_S)
    assert (jobs.run_dir / "saved").read_text() == "0"
    jobs.slurm.command("scancel", "--batch", "--signal=TERM", job)
    code, output = jobs.end(job, START_S)
    assert code == 9, output
    assert output.count("is requeued and resumes") == 1
    assert "went away" not in output


@pytest.mark.slurm
def test_preflight_checks_the_container(jobs, container):
    code, output = jobs.end(jobs.submit(script="slurm/preflight.sh", **container), 300)
    assert code in (0, 1), output
    found = rows(output)
    assert set(found) == {"n1", "n2"}
    for cells in found.values():
        assert (cells["tcp"], cells["shared"], cells["bwrap"]) == ("2/2", "yes", "yes"), output


@pytest.mark.slurm
@pytest.mark.slow(120)
def test_training_runs_in_the_container(jobs, container, assets):
    container["MEGA_AGENTRL_CONTAINER_MOUNTS"] += f",{assets}:{assets}"
    arguments = [*SMALL, "parallel=single", "total_steps=1", *asset_overrides(assets, jobs.run_dir)]
    code, output = jobs.end(jobs.submit(*arguments, nodes=1, **container), RUN_S)
    assert code == 0, output[-3000:]
    assert json.loads((jobs.run_dir / "summary.json").read_text())["num_steps"] == 1


def start_step(folder, image, **variables):
    """Start a program by slurm/steps.sh with programs that print their arguments."""
    for name in ("srun", "apptainer"):
        program = folder / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/bin/bash\nfor word; do echo "$word"; done\n')
        program.chmod(0o755)
    environment = {
        "PATH": f"{folder / 'programs'}:/usr/bin:/bin",
        "MEGA_AGENTRL_ROOT": str(ROOT),
        "MEGA_AGENTRL_CONTAINER": str(image),
        "MEGA_AGENTRL_CONTAINER_MOUNTS": "/data:/data",
        "SLURM_JOB_ID": "7",
        **variables,
    }
    script = "set -eu; head=n1; source slurm/steps.sh; here python -V"
    run = {"env": environment, "capture_output": True, "text": True, "check": False}
    return subprocess.run(["bash", "-c", script], cwd=ROOT, timeout=300, **run)


def test_sif_starts_apptainer_with_mounts_and_gpus(tmp_path):
    (tmp_path / "image.sif").touch()
    words = start_step(tmp_path, tmp_path / "image.sif", SLURM_GPUS_ON_NODE="8").stdout.splitlines()
    start = words.index(str(tmp_path / "programs/apptainer"))
    assert "--nodelist=n1" in words[:start]
    assert words[start + 1 :] == [
        *("exec", "--nv", "--bind", f"{ROOT}:{ROOT},/tmp:/tmp,/data:/data"),
        *(str(tmp_path / "image.sif"), "bash", f"{ROOT}/slurm/run.sh", "python", "-V"),
    ]


@pytest.mark.parametrize(
    ("image", "reason"),
    [("/no/image.sif", "no such file"), ("registry#image:tag", "pyxis is not installed")],
    ids=["file", "plugin"],
)
def test_container_that_cannot_start_is_refused_at_once(tmp_path, image, reason):
    completed = start_step(tmp_path, image)
    assert completed.returncode == 2
    assert reason in completed.stderr and image in completed.stderr
