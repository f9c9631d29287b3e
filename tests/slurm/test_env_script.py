"""slurm/env.sh: the variables of the programs on a node."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


@pytest.fixture
def cache_dirs(tmp_path):
    """Return a function that sources the script and returns the caches by variable."""

    def source(**changes):
        kept = {name: value for name, value in os.environ.items() if name not in CACHES}
        variables = {"MEGA_AGENTRL_ROOT": str(ROOT), "MEGA_AGENTRL_CONTAINER": "image.sif"}
        done = subprocess.run(
            ["bash", "-c", "source slurm/env.sh; env"],
            cwd=ROOT,
            env=kept | variables | changes,
            capture_output=True,
            text=True,
            check=True,
        )
        assert not done.stderr
        found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        return {name: found[name] for name in CACHES}

    return source


def test_kernels_are_cached_on_the_node_for_this_user_alone(cache_dirs, tmp_path):
    disk = tmp_path / "disk"
    folder = disk / f"mega_agentrl-kernels-{os.getuid()}"
    expected = {name: str(folder / part) for name, part in CACHES.items()}
    for _ in range(2):
        assert cache_dirs(MEGA_AGENTRL_LOCAL_DIR=str(disk), TMPDIR="/elsewhere") == expected
        assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_dirs(TMPDIR=str(disk)) == expected


def test_a_site_chooses_other_folders(cache_dirs, tmp_path):
    found = cache_dirs(TMPDIR=str(tmp_path), VLLM_CACHE_ROOT="/scratch/vllm")
    assert found["VLLM_CACHE_ROOT"] == "/scratch/vllm"
    assert found["TRITON_CACHE_DIR"].startswith(str(tmp_path))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(cache_dirs, tmp_path):
    foreign = tmp_path / "mega_agentrl-kernels-0"
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)
    for path in cache_dirs(TMPDIR=str(tmp_path)).values():
        assert Path(path).parent != foreign
