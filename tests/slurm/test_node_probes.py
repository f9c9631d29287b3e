"""slurm/node_probes.py: checks that start programs, on this machine and with faked outputs."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm import node_probes
from slurm.node_checks import FAIL, OK, WARN, Finding
from slurm.ray_cluster import find_port_pair


@pytest.fixture
def gpu_node(monkeypatch, tmp_path):
    """A node with the device file of NVIDIA's driver, a compiler and Python's headers."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(node_probes, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(node_probes.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "/usr/bin/gcc")
    return tmp_path


def ended(code, output="", errors=""):
    """Return a `run_program` that ends like that."""
    return lambda *command, timeout_s: subprocess.CompletedProcess(command, code, output, errors)


def test_failed_import_names_the_interpreter(monkeypatch):
    monkeypatch.setattr(node_probes, "IMPORT_PROGRAM", "import json, no_such_package")
    found = node_probes.check_imports()["imports"]
    assert (found.value, found.state) == ("no", FAIL)
    assert "no_such_package" in found.reason and sys.executable in found.reason


def test_import_check_returns_versions(monkeypatch):
    monkeypatch.setattr(node_probes, "PACKAGES", ("json",))
    found = node_probes.check_imports()
    assert set(found) == {"python", "imports", "torch", "nccl", "ray"}
    assert all(cell.state == OK for cell in found.values())
    assert found["ray"].value.count(".") == 2


def test_node_with_gpus_compiles_a_kernel(gpu_node, monkeypatch):
    monkeypatch.setattr(node_probes, "run_program", ended(0, "a warning\nyes\n"))
    assert node_probes.check_compiler() == Finding("yes")
    failed = ended(1, errors="Traceback\nInductorError: gcc: Python.h: No such file\n")
    monkeypatch.setattr(node_probes, "run_program", failed)
    assert node_probes.check_compiler() == Finding(
        "no", FAIL, "InductorError: gcc: Python.h: No such file"
    )
    monkeypatch.setattr(node_probes, "run_program", lambda *command, timeout_s: None)
    assert "no answer within" in node_probes.check_compiler().reason


@pytest.mark.parametrize(("has_gpu", "state"), [(True, FAIL), (False, WARN)])
def test_missing_compiler_and_headers_are_named(gpu_node, monkeypatch, has_gpu, state):
    (gpu_node / "Python.h").unlink()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    if not has_gpu:
        (gpu_node / "nvidiactl").unlink()
    found = node_probes.check_compiler()
    assert (found.value, found.state) == ("no", state)
    assert "gcc" in found.reason and str(gpu_node / "Python.h") in found.reason


def test_node_without_gpus_only_needs_compiler_and_headers(gpu_node, monkeypatch):
    (gpu_node / "nvidiactl").unlink()
    monkeypatch.setattr(node_probes, "run_program", ended(1))
    assert node_probes.check_compiler() == Finding("yes")


@pytest.mark.slow(30)
def test_kernel_is_compiled_and_compared_with_its_definition():
    program = [sys.executable, "-m", "slurm.node_probes", "compile"]
    assert subprocess.run([*program, "cpu"], check=True, capture_output=True, text=True).stdout
    assert subprocess.run([*program, "no-device"], check=False, capture_output=True).returncode


@pytest.mark.extended
def test_gloo_connects_nodes_on_the_interface_of_their_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    peers = {node: ("127.0.0.1", 0, find_port_pair(11)) for node in ("n1", "n2")}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda node: node_probes.check_gloo(peers, node), peers))
    assert found == [Finding("lo", OK)] * 2


@pytest.mark.extended
def test_wrong_interface_of_gloo_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    found = node_probes.check_gloo({"n1": ("127.0.0.1", 0, find_port_pair(11))}, "n1")
    assert (found.value, found.state) == ("no", FAIL)
    assert "no-such0" in found.reason and "GLOO_SOCKET_IFNAME" in found.reason


def test_missing_bubblewrap_fails(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = node_probes.check_sandbox()
    assert (found.value, found.state) == ("no", FAIL)
    assert "bubblewrap" in found.reason
