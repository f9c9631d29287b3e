"""Checks that read the state of one node of an allocation: GPUs, driver, network, disks, limits.

Each check returns `Finding`s: a short value for the table, and a reason for a warning or a failure.
This module uses only the standard library (and NVML if present), because it must run in a broken
environment. The checks change nothing on the node. `node_probes` has checks that start programs.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"
PROGRAM_TIMEOUT_S = 60
MIN_FILES = 4096  # Ray opens some for each worker and connection
GOOD_FILES = 65536
MIN_LOCAL_GIB = 5.0  # Ray's logs and spilled objects
MIN_SHM_GIB = 1.0  # Ray's objects, NCCL's and vLLM's segments
MIN_SHARED_GIB = 20.0  # a checkpoint
MAX_NVLINKS = 18  # NVLinks of an H100 or B200
# Oldest driver that runs programs built for a major version of CUDA.
MIN_DRIVER_BY_CUDA = {12: "525.60.13", 13: "580.65.06"}


@dataclass(frozen=True)
class Finding:
    """One cell of the table."""

    value: str
    """Short text of the cell."""
    state: str = OK
    """`ok`, `warn` or `FAIL`."""
    reason: str = ""
    """Sentence that explains a warning or a failure."""


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
            "driver": check_driver(driver, _supported_cuda(), find_torch_cuda()),
            "ecc": _ecc_finding(nvml, devices),
            "nvlink": Finding(_nvlink_counts(nvml, devices)),
        }
    except nvml.NVMLError as error:
        return {"gpus": Finding("error", FAIL, f"NVML: {error}; probable cause: a failed GPU")}
    finally:
        nvml.nvmlShutdown()


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def check_driver(driver: str, supported_cuda: int, torch_cuda: str | None) -> Finding:
    """Check that the driver of a node with GPUs runs programs of torch's version of CUDA.

    Args:
        driver: Version of the kernel driver.
        supported_cuda: Newest version of CUDA that the driver library supports, as
            1000 * major + 10 * minor. A compatibility package on the library path raises it.
        torch_cuda: Version of CUDA that torch is built for; None for a build for CPUs, empty if
            torch is not installed.
    """
    if torch_cuda == "":
        return Finding(driver)
    if torch_cuda is None:
        return Finding(driver, FAIL, "torch is a build for CPUs; run make env DEVICE=gpu")
    major = int(torch_cuda.split(".")[0])
    if supported_cuda >= 1000 * major:
        return Finding(driver)
    minimum = MIN_DRIVER_BY_CUDA.get(major)
    reason = (
        f"driver {driver} supports CUDA {supported_cuda // 1000}.{supported_cuda % 1000 // 10}, "
        f"torch needs {torch_cuda}: expected a driver "
        + (f"from {minimum} on" if minimum else f"for CUDA {major}")
        + f", or the package cuda-compat-{torch_cuda.replace('.', '-')} and its folder in "
        "LD_LIBRARY_PATH (slurm/env.sh)"
    )
    return Finding(driver, FAIL, reason)


def _supported_cuda() -> int:
    """Return the newest version of CUDA that this node's driver library supports; 0 without one."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def find_torch_cuda() -> str | None:
    """Return the version of CUDA that torch is built for, without importing torch.

    Returns None for a build for CPUs, and an empty string if torch is not installed.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return version


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
    completed = run_program("dmesg")
    return re.findall(r"NVRM: (Xid .*)", completed.stdout) if completed else []


def run_program(
    *command: str, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a program; None if it does not exist or does not end within the timeout."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S if timeout_s is None else timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


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
    rates, inactive_ports = [], []
    for port in sorted(folder.glob("*/ports/*")):
        state = (port / "state").read_text().split(":")[-1].strip()
        if state == "ACTIVE":
            rates.append((port / "rate").read_text().split()[0])
        else:
            inactive_ports.append(f"{port.parents[1].name}/{port.name} is {state}")
    value = "+".join(f"{rates.count(rate)}x{rate}" for rate in sorted(set(rates)))
    state = WARN if inactive_ports else OK
    return Finding(value or "none", state, "; ".join(inactive_ports))


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
