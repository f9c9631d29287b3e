"""Checks of one node of an allocation: Python, GPUs, network, disks, limits, sandbox.

Each check returns `Finding`s: a short value for the table, and a reason for a warning or a failure.
This module uses only the standard library (and NVML if present), because it must run in a broken
environment. The checks change nothing on the node.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

OK, WARN, FAIL = "ok", "warn", "FAIL"
IMPORT_TIMEOUT_S = 240
PROGRAM_TIMEOUT_S = 20
MIN_FILES = 4096  # Ray opens some for each worker and connection
GOOD_FILES = 65536
MIN_LOCAL_GIB = 5.0  # Ray's logs and spilled objects
MIN_SHM_GIB = 1.0  # Ray's objects, NCCL's and vLLM's segments
MIN_SHARED_GIB = 20.0  # a checkpoint
MAX_NVLINKS = 18  # NVLinks of an H100 or B200
# Packages that every node must be able to import.
PACKAGES = ("torch", "ray", "vllm", "megatron.core", "mega_agentrl")
IMPORT_PROGRAM = """
import importlib, json, sys, time
start = time.perf_counter()
import torch
for name in sys.argv[1:]:
    importlib.import_module(name)
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except (AttributeError, ImportError, RuntimeError):
    nccl = "none"
from importlib.metadata import version
print(json.dumps({
    "torch": torch.__version__, "nccl": nccl, "ray": version("ray"),
    "seconds": time.perf_counter() - start,
}))
"""


@dataclass(frozen=True)
class Finding:
    """One cell of the table."""

    value: str
    """Short text of the cell."""
    state: str = OK
    """`ok`, `warn` or `FAIL`."""
    reason: str = ""
    """Sentence that explains a warning or a failure."""


def check_imports() -> dict[str, Finding]:
    """Check whether the stack imports; return `python`, `imports`, `torch`, `nccl` and `ray`."""
    python = Finding(platform.python_version())
    command = [sys.executable, "-c", IMPORT_PROGRAM, *PACKAGES]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        reason = (
            f"{', '.join(PACKAGES)} did not import within {IMPORT_TIMEOUT_S} s: a slow file system?"
        )
        return {"python": python, "imports": Finding("slow", FAIL, reason)}
    if completed.returncode:
        last = completed.stderr.strip().splitlines()[-1:] or ["no message"]
        reason = f"{sys.executable} cannot import {', '.join(PACKAGES)}: {last[0]}"
        return {"python": python, "imports": Finding("no", FAIL, reason)}
    report = json.loads(completed.stdout.splitlines()[-1])
    findings = {"python": python, "imports": Finding(f"{report['seconds']:.0f} s")}
    return findings | {name: Finding(str(report[name])) for name in ("torch", "nccl", "ray")}


def check_gpus() -> dict[str, Finding]:
    """Return `gpus`, `driver`, `ecc` and `nvlink` from NVML; only `gpus` on a node without GPUs."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return {"gpus": Finding("?", FAIL, "nvidia-ml-py is not installed")}
    except nvml.NVMLError as error:
        return {"gpus": _gpu_count_finding(0, "", f"no GPU: NVML says {error}")}
    try:
        driver = _decode(nvml.nvmlSystemGetDriverVersion())
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = {_decode(nvml.nvmlDeviceGetName(device)) for device in devices}
        name = "/".join(sorted(names)).replace("NVIDIA ", "").replace(" ", "-")
        return {
            "gpus": _gpu_count_finding(len(devices), name, "no GPU: NVML sees none"),
            "driver": Finding(driver),
            "ecc": _ecc_finding(nvml, devices),
            "nvlink": Finding(_nvlink_counts(nvml, devices)),
        }
    except nvml.NVMLError as error:
        return {"gpus": Finding("error", FAIL, f"NVML: {error}; probable cause: a failed GPU")}
    finally:
        nvml.nvmlShutdown()


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu_count_finding(number: int, name: str, no_gpu_reason: str) -> Finding:
    num_slurm_gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    value = f"{number}x{name}" if number else "no GPU"
    if num_slurm_gpus.isdigit() and number < int(num_slurm_gpus):
        return Finding(value, FAIL, f"Slurm gave {num_slurm_gpus} GPUs, NVML sees {number}")
    return Finding(value, OK, "" if number else no_gpu_reason)


def _ecc_finding(nvml: Any, devices: list[Any]) -> Finding:
    """Check uncorrected memory errors since the driver was loaded, row remapping and Xid errors."""
    problems = []
    for index, device in enumerate(devices):
        try:
            count = nvml.nvmlDeviceGetTotalEccErrors(
                device,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            )
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(device)
        except nvml.NVMLError:
            continue  # the GPU has no ECC memory
        if count or pending or failed:
            problems.append(
                f"GPU {index}: {count} uncorrected errors, rows pending {pending}, failed {failed}"
            )
    xids = _kernel_xids()
    if problems or xids:
        messages = [*problems, *(f"kernel log: {line}" for line in xids[-3:])]
        return Finding(
            f"{len(problems)}+{len(xids)}", FAIL if problems else WARN, "; ".join(messages)
        )
    return Finding("0")


def _kernel_xids() -> list[str]:
    """Return the GPU errors in the kernel log; empty if it cannot be read."""
    completed = _run_program("dmesg")
    return re.findall(r"NVRM: (Xid .*)", completed.stdout) if completed else []


def _nvlink_counts(nvml: Any, devices: list[Any]) -> str:
    """Return the number of active NVLinks per GPU: `18` if all are equal, else `18,17`."""
    numbers = set()
    for device in devices:
        active = 0
        for link in range(MAX_NVLINKS):
            try:
                active += int(nvml.nvmlDeviceGetNvLinkState(device, link))
            except nvml.NVMLError:
                break
        numbers.add(active)
    return ",".join(str(number) for number in sorted(numbers, reverse=True)) or "0"


def check_infiniband(folder: Path = Path("/sys/class/infiniband")) -> Finding:
    """Return number and rate of active ports (`8x400`), `none` without InfiniBand devices."""
    rates, down = [], []
    for port in sorted(folder.glob("*/ports/*")):
        state = (port / "state").read_text().split(":")[-1].strip()
        if state == "ACTIVE":
            rates.append((port / "rate").read_text().split()[0])
        else:
            down.append(f"{port.parents[1].name}/{port.name} is {state}")
    counted = "+".join(f"{rates.count(rate)}x{rate}" for rate in sorted(set(rates)))
    return Finding(counted or "none", WARN if down else OK, "; ".join(down))


def check_disk(shared: Path, local: Path) -> Finding:
    """Check the free GiB of the shared folder, the local folder and /dev/shm."""
    minimum_by_folder = {
        shared: (MIN_SHARED_GIB, WARN),
        local: (MIN_LOCAL_GIB, FAIL),
        Path("/dev/shm"): (MIN_SHM_GIB, FAIL),
    }
    free, state, reasons = [], OK, []
    for folder, (min_gib, state_if_low) in minimum_by_folder.items():
        if not folder.is_dir():
            free.append("-")
            state = FAIL
            reasons.append(f"{folder} does not exist")
            continue
        gib = shutil.disk_usage(folder).free / 2**30
        free.append(f"{gib:.0f}")
        if gib < min_gib:
            state = FAIL if FAIL in (state, state_if_low) else WARN
            reasons.append(f"{folder}: {gib:.1f} GiB free, expected {min_gib:g}")
    return Finding("/".join(free), state, "; ".join(reasons))


def check_limits(num_ib_devices: int) -> Finding:
    """Check the limits on open files and on locked memory, which InfiniBand needs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_unlimited = locked == resource.RLIM_INFINITY
    locked_text = "unlimited" if is_unlimited else f"{locked / 2**20:.0f}M"
    files_text = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    value = f"{files_text}/{locked_text}"
    if num_ib_devices and not is_unlimited:
        return Finding(value, FAIL, f"ulimit -l is {locked_text}; InfiniBand needs unlimited")
    if files != resource.RLIM_INFINITY and files < GOOD_FILES:
        state = FAIL if files < MIN_FILES else WARN
        return Finding(value, state, f"ulimit -n is {files}, expected {GOOD_FILES}")
    return Finding(value)


def check_sandbox() -> Finding:
    """Check that bubblewrap can create the namespaces that isolate sandboxes."""
    if shutil.which("bwrap") is None:
        return Finding("no", FAIL, "bwrap is not installed (package bubblewrap)")
    completed = _run_program(
        "bwrap", "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"
    )
    if completed is None or completed.returncode:
        message = (
            completed.stderr.strip() if completed else f"did not end within {PROGRAM_TIMEOUT_S} s"
        )
        reason = f"bwrap: {message}; probable cause: unprivileged user namespaces are off"
        return Finding("no", FAIL, reason)
    return Finding("yes")


def _run_program(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def all_checks(shared: Path) -> dict[str, Callable[[], dict[str, Finding]]]:
    """Return the checks of this node by name; each returns some columns of the table.

    Args:
        shared: Folder that all nodes share.
    """
    local = Path(os.environ.get("MEGA_AGENTRL_LOCAL_DIR") or tempfile.gettempdir())
    num_ib_devices = len(list(Path("/sys/class/infiniband").glob("*")))
    return {
        "imports": check_imports,
        "gpus": check_gpus,
        "ib": lambda: {"ib": check_infiniband()},
        "disk": lambda: {"disk": check_disk(shared, local)},
        "limits": lambda: {"limits": check_limits(num_ib_devices)},
        "bwrap": lambda: {"bwrap": check_sandbox()},
    }
