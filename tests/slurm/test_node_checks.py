"""slurm/node_checks.py: findings of healthy and broken nodes."""

import resource

import pytest

from slurm import node_checks
from slurm.node_checks import FAIL, OK, WARN


def add_port(folder, device, port, state, rate):
    place = folder / device / "ports" / str(port)
    place.mkdir(parents=True)
    (place / "state").write_text(f"{state}\n")
    (place / "rate").write_text(f"{rate}\n")


def test_infiniband_counts_active_ports_by_rate_and_names_those_that_are_down(tmp_path):
    for index in range(3):
        add_port(tmp_path, f"mlx5_{index}", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)")
    add_port(tmp_path, "mlx5_3", 1, "4: ACTIVE", "100 Gb/sec (4X EDR)")
    found = node_checks.check_infiniband(tmp_path)
    assert (found.value, found.state) == ("1x100+3x400", OK)
    add_port(tmp_path, "mlx5_4", 1, "1: DOWN", "400 Gb/sec (4X NDR)")
    found = node_checks.check_infiniband(tmp_path)
    assert (found.value, found.state) == ("1x100+3x400", WARN)
    assert found.reason == "mlx5_4/1 is DOWN"


def test_no_infiniband_is_no_failure(tmp_path):
    assert node_checks.check_infiniband(tmp_path / "none") == node_checks.Finding("none")


def test_node_without_gpus_fails_if_slurm_allocated_some(monkeypatch):
    import pynvml

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    found = node_checks.check_gpus()
    assert set(found) == {"gpus"}
    assert (found["gpus"].value, found["gpus"].state) == ("no GPU", OK)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    failed = node_checks.check_gpus()["gpus"]
    assert failed.state == FAIL and "8 GPUs" in failed.reason


@pytest.mark.parametrize(
    ("supported_cuda", "torch_cuda", "state"),
    [
        (13000, "13.0", OK),
        (13010, "13.0", OK),
        (13000, "13.2", OK),  # all of CUDA 13 runs on each of its drivers
        (12080, "13.0", FAIL),
        (13000, "12.8", OK),
        (0, "13.0", FAIL),
        (13000, None, FAIL),
        (12080, "", OK),  # the check of the imports reports it
    ],
)
def test_driver_must_support_the_cuda_version_of_torch(supported_cuda, torch_cuda, state):
    found = node_checks.check_driver("570.86.15", supported_cuda, torch_cuda)
    assert (found.value, found.state) == ("570.86.15", state)
    assert bool(found.reason) == (state != OK)


def test_old_driver_names_the_minimum_and_the_compatibility_package():
    reason = node_checks.check_driver("570.86.15", 12080, "13.0").reason
    assert "supports CUDA 12.8" in reason
    assert "580.65.06" in reason and "cuda-compat-13-0" in reason


def test_cuda_version_of_torch_is_found_without_importing_it():
    import torch

    assert node_checks.find_torch_cuda() == torch.version.cuda


def test_full_disk_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(node_checks, "MIN_SHARED_GIB", 0.0)
    assert node_checks.check_disk(tmp_path, tmp_path).value.count("/") >= 1
    monkeypatch.setattr(node_checks, "MIN_LOCAL_GIB", 1e9)
    local = tmp_path / "local"
    local.mkdir()
    found = node_checks.check_disk(tmp_path, local)
    assert found.state == FAIL and str(local) in found.reason
    assert f"{tmp_path}/none " in node_checks.check_disk(tmp_path, tmp_path / "none").reason


@pytest.mark.parametrize(
    ("files", "locked", "devices", "state"),
    [
        (65536, -1, 8, OK),
        (65536, 65536, 0, OK),
        (65536, 65536, 8, FAIL),
        (8192, -1, 8, WARN),
        (1024, -1, 0, FAIL),
        (-1, -1, 0, OK),
    ],
)
def test_low_limits_on_open_files_and_locked_memory_are_named(
    monkeypatch, files, locked, devices, state
):
    values = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: locked}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values[kind], values[kind]))
    found = node_checks.check_limits(devices)
    assert found.state == state
    assert bool(found.reason) == (state != OK)


def test_missing_or_hanging_program_returns_none(monkeypatch):
    assert node_checks.run_program("no-such-program") is None
    monkeypatch.setattr(node_checks, "PROGRAM_TIMEOUT_S", 0.2)
    assert node_checks.run_program("sleep", "10") is None
