"""Checks of one node that start programs: imports, compiled kernels, gloo, bubblewrap.

Each check returns `Finding`s. Checks that need torch run in processes of their own, so that a
broken environment or a blocked peer does not affect other checks:

    python -m slurm.node_probes compile DEVICE
    python -m slurm.node_probes gloo HOST PORT RANK SIZE ADDRESS
    python -m slurm.node_probes sandbox
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm.node_checks import FAIL, OK, PROGRAM_TIMEOUT_S, WARN, Finding, run_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMPORT_TIMEOUT_S = 240
COMPILE_TIMEOUT_S = 240
GLOO_ARRIVE_S = 200  # for slow imports on other nodes
GLOO_MEET_S = 60
NVIDIA_DEVICE = Path("/dev/nvidiactl")
# Packages that every node must be able to import.
PACKAGES = ("torch", "ray", "vllm", "megatron.core", "mega_agentrl")
IMPORT_PROGRAM = """
import importlib, json, sys, time
start = time.perf_counter()
import torch
for name in sys.argv[1:]:
    importlib.import_module(name)
if torch.cuda.is_available():
    import vllm._C_stable_libtorch  # vLLM itself only warns if its kernels do not fit this torch
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


def check_imports() -> dict[str, Finding]:
    """Check whether the stack imports; return `python`, `imports`, `torch`, `nccl` and `ray`."""
    python = Finding(platform.python_version())
    command = [sys.executable, "-c", IMPORT_PROGRAM, *PACKAGES]
    completed = run_program(*command, timeout_s=IMPORT_TIMEOUT_S)
    if completed is None:
        reason = (
            f"{', '.join(PACKAGES)} did not import within {IMPORT_TIMEOUT_S} s: a slow file system?"
        )
        return {"python": python, "imports": Finding("slow", FAIL, reason)}
    if completed.returncode:
        last_line = completed.stderr.strip().splitlines()[-1:] or ["no message"]
        reason = f"{sys.executable} cannot import {', '.join(PACKAGES)}: {last_line[0]}"
        return {"python": python, "imports": Finding("no", FAIL, reason)}
    report = json.loads(completed.stdout.splitlines()[-1])
    findings = {"python": python, "imports": Finding(f"{report['seconds']:.0f} s")}
    return findings | {name: Finding(str(report[name])) for name in ("torch", "nccl", "ray")}


def check_compiler() -> Finding:
    """Check that Triton and torch.compile can build kernels here.

    Both need a C compiler and Python's headers, without which a run might fail only in its first
    step. A node with GPUs compiles and runs one kernel.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    has_gpu = NVIDIA_DEVICE.exists()
    missing = [] if compiler else ["no C compiler (gcc)"]
    if not header.is_file():
        missing.append(f"no {header} (Debian: python3-dev)")
    if missing:
        reason = f"{' and '.join(missing)}: kernels cannot be compiled on a GPU"
        return Finding("no", FAIL if has_gpu else WARN, reason)
    if not has_gpu:
        return Finding("yes")
    probe = [sys.executable, "-m", "slurm.node_probes", "compile", "cuda"]
    return _read_probe(run_program(*probe, timeout_s=COMPILE_TIMEOUT_S), COMPILE_TIMEOUT_S)


def check_gloo(peers: Mapping[str, Sequence[Any]], node: str) -> Finding:
    """Check that gloo, on the interface that a run would use, connects this node with all others.

    Args:
        peers: Address, port of the connection test, and port of the rendezvous, by node. The first
            node opens the rendezvous.
        node: Name of this node.
    """
    host, _, port = next(iter(peers.values()))
    rank = list(peers).index(node)
    arguments = (host, port, rank, len(peers), peers[node][0])
    probe = [sys.executable, "-m", "slurm.node_probes", "gloo", *map(str, arguments)]
    timeout_s = GLOO_ARRIVE_S + 2 * GLOO_MEET_S
    finding = _read_probe(run_program(*probe, timeout_s=timeout_s), timeout_s)
    if finding.state == OK:
        return finding
    cause = "GLOO_SOCKET_IFNAME in slurm/env.sh names the wrong network, or a firewall"
    return Finding("no", FAIL, f"{finding.reason}; probable cause: {cause}")


def _read_probe(completed: Any, timeout_s: float) -> Finding:
    """Return the last line of a probe's output; its last error if it has failed."""
    if completed is None:
        return Finding("no", FAIL, f"no answer within {timeout_s:g} s")
    if completed.returncode:
        last_line = completed.stderr.strip().splitlines()[-1:] or ["no message"]
        return Finding("no", FAIL, last_line[0])
    return Finding(completed.stdout.strip().splitlines()[-1])


def check_sandbox() -> Finding:
    """Check that sandboxes can run here: the namespaces, mounts and user ids that they need."""
    probe = [sys.executable, "-m", "slurm.node_probes", "sandbox"]
    return _read_probe(run_program(*probe), PROGRAM_TIMEOUT_S)


def compile_kernel(device: str) -> None:
    """Compile a fused activation for a device, without any cache, and compare its values."""
    with tempfile.TemporaryDirectory() as folder:
        # torch and Triton read these when they are imported.
        os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        import torch

        def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(gate) * up

        gate, up = torch.randn(2, 4096, device=device)
        torch.testing.assert_close(torch.compile(swiglu)(gate, up), swiglu(gate, up))


def meet_over_gloo(host: str, port: int, rank: int, size: int, address: str) -> str:
    """Sum a number over all nodes; return the interface that gloo used.

    Raises:
        RuntimeError: Nodes are missing, or cannot connect to each other.
    """
    from mega_agentrl.runtime.gloo_interface import use_interface_of

    interface = use_interface_of(address)
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    arrive_timeout = timedelta(seconds=GLOO_ARRIVE_S)
    store = TCPStore(host, port, None, rank == 0, timeout=arrive_timeout, wait_for_workers=False)
    store.set(f"arrived/{rank}", "1")
    store.wait([f"arrived/{peer}" for peer in range(size)], arrive_timeout)
    meet_timeout = timedelta(seconds=GLOO_MEET_S)
    try:
        group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=meet_timeout)
        total = torch.tensor([float(rank)])
        group.allreduce([total]).wait()
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise RuntimeError(f"gloo on {interface or 'the host name'}: {line}") from error
    if total.item() != size * (size - 1) / 2:
        raise RuntimeError(f"the sum over {size} nodes is {total.item()}")
    store.set(f"left/{rank}", "1")
    if rank == 0:  # the store ends with this process
        store.wait([f"left/{peer}" for peer in range(size)], meet_timeout)
    return interface or "default"


def main(arguments: Sequence[str]) -> int:
    """Run a probe of the module docstring; its result is the last line of the output."""
    match arguments:
        case ["compile", device]:
            compile_kernel(device)
            print("yes")
        case ["gloo", host, port, rank, size, address]:
            print(meet_over_gloo(host, int(port), int(rank), int(size), address))
        case ["sandbox"]:
            from mega_agentrl.sandbox.pool import check_machine

            check_machine()
            print("yes")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
