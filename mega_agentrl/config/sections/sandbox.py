"""Settings of the Python tool and its sandboxes (`tool.python.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.enums import PythonMode, SandboxIsolation
from mega_agentrl.config.sections.ranges import check_range

_MIN_VALUES = {
    "num_hosts": 0,
    "num_workers": 1,
    "memory_limit_mib": 64,
}


@dataclass
class PythonToolConfig:
    """The sandboxed Python interpreter.

    Fixed limits are 4000 characters of output, 64 processes, 256 open files per process, and 64 MiB
    each of /tmp and /dev/shm.
    """

    mode: PythonMode = PythonMode.stateless
    """stateless: each call has a fresh interpreter, as in ARPO; stateful: one interpreter per
    trajectory, which forks with it."""
    isolation: SandboxIsolation = SandboxIsolation.bubblewrap
    """Isolation of sandboxed code from this machine."""
    num_hosts: int = 0
    """Ray actors that run sandboxes, spread over the nodes of the cluster; 0 runs them on the
    driver. They use only nodes with the resource `sandbox_host` if there are any (`ray start
    --resources='{"sandbox_host": 1}'`)."""
    num_workers: int = 2
    """Warm sandboxes, and concurrent calls, of each host."""
    timeout_s: float = 10.0
    """Wall-clock limit of a call; also the CPU-time limit of each of its processes."""
    memory_limit_mib: int = 512
    """Address-space limit of a process beyond the warm interpreter. All processes and files of a
    trajectory and its forks are limited to four times as much where a control group can be
    created."""
    preload_modules: list[str] = field(default_factory=lambda: ["numpy", "sympy", "pandas"])
    """Modules imported once in every warm interpreter; more modules make forks slower."""

    def __post_init__(self) -> None:
        check_range(self.timeout_s > 0, "tool.python.timeout_s", self.timeout_s, "above 0")
        for name, least in _MIN_VALUES.items():
            value = getattr(self, name)
            check_range(value >= least, f"tool.python.{name}", value, f"at least {least}")

    @property
    def total_memory_mib(self) -> int:
        """Memory limit of a whole sandbox: some of its 64 processes at their limit, not all."""
        return 4 * self.memory_limit_mib
