"""The tests for a single GPU run where hardly anything is installed: no vLLM, no Ray, no Hydra.

They run here with only these packages and what they require on the path. See `make test-gpu`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "megatron-core", "pytest", "hypothesis")
FOLDERS = ("tests/gpu", "tests/actor", "tests/reshard/transports")


def required_distributions():
    """Return the packages and all that they require, by name."""
    found, names = {}, list(PACKAGES)
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with links to the files of these packages."""
    folder = tmp_path_factory.mktemp("site")
    for distribution in required_distributions().values():
        for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            target = distribution.locate_file(name)
            if not (folder / name).exists() and target.exists():
                (folder / name).symlink_to(target)
    assert (folder / "megatron").exists() and not (folder / "vllm").exists()
    return folder


def run_python(site, *arguments):
    """Run Python with the packages of `site` alone; return its output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def run_pytest(site, *arguments):
    return run_python(site, "-m", "pytest", "-p", "no:cacheprovider", *arguments)


def test_make_runs_the_tests_for_gpus_of_all_folders():
    files = [file.relative_to(ROOT).as_posix() for file in ROOT.glob("tests/**/test_*.py")
             if "pytest.mark.gpu" in file.read_text()]  # fmt: skip
    assert len(files) > 5
    assert all(file.startswith(FOLDERS) for file in files), files
    assert f"GPU_TESTS := {' '.join(FOLDERS)}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.extended
def test_the_tests_of_this_folder_are_collected(site):
    output = run_pytest(site, "--collect-only", "-m", "gpu", "-rs", "tests/gpu")
    for name in (
        "test_bfloat16_actor.py::test_scores_are_those_of_transformers[qwen3_moe-nccl]",
        "test_vocab_kernels.py::test_each_kernel_gives_the_outputs_and_gradients_of_float64",
        "test_weight_transfer.py::test_the_bits_received_are_those_sent[ipc-bfloat16]",
        "test_weight_transfer.py::test_a_digest_is_the_same_on_both_devices",
    ):
        assert name in output
    assert "could not import 'vllm'" in output


@pytest.mark.slow(40)
def test_the_tests_that_make_runs_are_collected(site):
    output = run_pytest(site, "--collect-only", "-m", "gpu and not slurm", *FOLDERS)
    assert "test_packed_attention.py::test_the_gpu_kernel_and_the_blocks_agree" in output


@pytest.mark.slow(60)
def test_the_actor_runs_with_these_packages_alone(site):
    output = run_pytest(site, "tests/gpu/test_bfloat16_actor.py", "-m", "not gpu")
    assert " passed" in output
    sizes = ("--tokens", "64", "--row", "16", "--layers", "2", "--hidden", "64", "--heads", "4")
    sizes += ("--kv-heads", "2", "--intermediate", "96", "--vocab", "128", "--repeats", "1")
    assert '"case": "tokens/L2/H64/T64"' in run_python(site, "tools/bench_actor.py", *sizes)
