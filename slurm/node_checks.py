"""What one node of an allocation is like: Python, GPUs, network, disks, limits, sandbox.

Each check gives `Finding`s: a short value for the table, and a sentence where something is not as
it should be. Standard library only (NVML where it is there), because it must run where the
environment is broken. Nothing is changed on the node.
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
IMPORT_S = 240
PROGRAM_S = 20
MIN_FILES = 4096  # Ray opens some for each worker and connection
GOOD_FILES = 65536
MIN_LOCAL_GIB = 5.0  # Ray's logs and spilled objects
MIN_SHM_GIB = 1.0  # Ray's objects, NCCL's and vLLM's segments
MIN_SHARED_GIB = 20.0  # a checkpoint
NVLINKS = 18  # the most a GPU of today has
# What a node must be able to import, and whose versions must agree.
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
    """One cell of the table. value: short; state: `ok`, `warn` or `FAIL`; why: a sentence."""

    value: str
    state: str = OK
    why: str = ""


def imports() -> dict[str, Finding]:
    """`python`, `imports`, `torch`, `nccl`, `ray`: versions, and whether the stack imports."""
    python = Finding(platform.python_version())
    words = [sys.executable, "-c", IMPORT_PROGRAM, *PACKAGES]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        why = f"{', '.join(PACKAGES)} did not import within {IMPORT_S} s: a slow file system?"
        return {"python": python, "imports": Finding("slow", FAIL, why)}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        why = f"{sys.executable} cannot import {', '.join(PACKAGES)}: {last[0]}"
        return {"python": python, "imports": Finding("no", FAIL, why)}
    said = json.loads(done.stdout.splitlines()[-1])
    found = {"python": python, "imports": Finding(f"{said['seconds']:.0f} s")}
    return found | {name: Finding(str(said[name])) for name in ("torch", "nccl", "ray")}


def gpus() -> dict[str, Finding]:
    """`gpus`, `driver`, `ecc`, `nvlink` from NVML; says plainly that there is none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return {"gpus": Finding("?", FAIL, "nvidia-ml-py is not installed")}
    except nvml.NVMLError as error:
        return {"gpus": _num_gpus(0, "", f"no GPU: NVML says {error}")}
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = {_text(nvml.nvmlDeviceGetName(device)) for device in devices}
        name = "/".join(sorted(names)).replace("NVIDIA ", "").replace(" ", "-")
        return {
            "gpus": _num_gpus(len(devices), name, "no GPU: NVML sees none"),
            "driver": Finding(driver),
            "ecc": _errors(nvml, devices),
            "nvlink": Finding(_links(nvml, devices)),
        }
    except nvml.NVMLError as error:
        return {"gpus": Finding("error", FAIL, f"NVML: {error}; probable cause: a GPU off the bus")}
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _num_gpus(number: int, name: str, none: str) -> Finding:
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    value = f"{number}x{name}" if number else "no GPU"
    if given.isdigit() and number < int(given):
        return Finding(value, FAIL, f"Slurm gave {given} GPUs, NVML sees {number}")
    return Finding(value, OK, "" if number else none)


def _errors(nvml: Any, devices: list[Any]) -> Finding:
    """Uncorrected memory errors since the driver was loaded, rows to be remapped, Xid messages."""
    wrong = []
    for index, device in enumerate(devices):
        try:
            count = nvml.nvmlDeviceGetTotalEccErrors(
                device,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            )
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(device)
        except nvml.NVMLError:
            continue  # without ECC memory
        if count or pending or failed:
            wrong.append(
                f"GPU {index}: {count} uncorrected errors, rows pending {pending}, failed {failed}"
            )
    xids = _xids()
    if wrong or xids:
        said = [*wrong, *(f"kernel log: {line}" for line in xids[-3:])]
        return Finding(f"{len(wrong)}+{len(xids)}", FAIL if wrong else WARN, "; ".join(said))
    return Finding("0")


def _xids() -> list[str]:
    """GPU errors in the kernel's log; none where it may not be read."""
    done = _run("dmesg")
    return re.findall(r"NVRM: (Xid .*)", done.stdout) if done else []


def _links(nvml: Any, devices: list[Any]) -> str:
    """Active NVLinks of each GPU: `18` where all have as many, else `18,17`."""
    numbers = set()
    for device in devices:
        active = 0
        for link in range(NVLINKS):
            try:
                active += int(nvml.nvmlDeviceGetNvLinkState(device, link))
            except nvml.NVMLError:
                break
        numbers.add(active)
    return ",".join(str(number) for number in sorted(numbers, reverse=True)) or "0"


def infiniband(folder: Path = Path("/sys/class/infiniband")) -> Finding:
    """Active ports and their rates: `8x400`; `none` without such devices."""
    rates, down = [], []
    for port in sorted(folder.glob("*/ports/*")):
        state = (port / "state").read_text().split(":")[-1].strip()
        if state == "ACTIVE":
            rates.append((port / "rate").read_text().split()[0])
        else:
            down.append(f"{port.parents[1].name}/{port.name} is {state}")
    counted = "+".join(f"{rates.count(rate)}x{rate}" for rate in sorted(set(rates)))
    return Finding(counted or "none", WARN if down else OK, "; ".join(down))


def disk(shared: Path, local: Path) -> Finding:
    """Free GiB of the shared folder, the local one and /dev/shm."""
    wants = {
        shared: (MIN_SHARED_GIB, WARN),
        local: (MIN_LOCAL_GIB, FAIL),
        Path("/dev/shm"): (MIN_SHM_GIB, FAIL),
    }
    free, state, why = [], OK, []
    for folder, (least_gib, consequence) in wants.items():
        if not folder.is_dir():
            free.append("-")
            state = FAIL
            why.append(f"{folder} is not there")
            continue
        gib = shutil.disk_usage(folder).free / 2**30
        free.append(f"{gib:.0f}")
        if gib < least_gib:
            state = FAIL if FAIL in (state, consequence) else WARN
            why.append(f"{folder}: {gib:.1f} GiB free, expected {least_gib:g}")
    return Finding("/".join(free), state, "; ".join(why))


def limits(num_ib_devices: int) -> Finding:
    """Open files, and memory that may be locked, which InfiniBand needs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_unlimited = locked == resource.RLIM_INFINITY
    shown = "unlimited" if is_unlimited else f"{locked / 2**20:.0f}M"
    many = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    value = f"{many}/{shown}"
    if num_ib_devices and not is_unlimited:
        return Finding(value, FAIL, f"ulimit -l is {shown}; InfiniBand needs unlimited")
    if files != resource.RLIM_INFINITY and files < GOOD_FILES:
        state = FAIL if files < MIN_FILES else WARN
        return Finding(value, state, f"ulimit -n is {files}, expected {GOOD_FILES}")
    return Finding(value)


def sandbox() -> Finding:
    """Whether bubblewrap can make its namespaces, which keeps the policy's code in."""
    if shutil.which("bwrap") is None:
        return Finding("no", FAIL, "bwrap is not installed (package bubblewrap)")
    done = _run("bwrap", "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true")
    if done is None or done.returncode:
        said = done.stderr.strip() if done else f"no end within {PROGRAM_S} s"
        why = f"bwrap: {said}; probable cause: unprivileged user namespaces are off"
        return Finding("no", FAIL, why)
    return Finding("yes")


def _run(*words: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def all_checks(shared: Path) -> dict[str, Callable[[], dict[str, Finding]]]:
    """The checks of this node by name; each gives some columns. shared: a folder all nodes see."""
    local = Path(os.environ.get("MEGA_AGENTRL_LOCAL_DIR") or tempfile.gettempdir())
    num_ib_devices = len(list(Path("/sys/class/infiniband").glob("*")))
    return {
        "imports": imports,
        "gpus": gpus,
        "ib": lambda: {"ib": infiniband()},
        "disk": lambda: {"disk": disk(shared, local)},
        "limits": lambda: {"limits": limits(num_ib_devices)},
        "bwrap": lambda: {"bwrap": sandbox()},
    }
