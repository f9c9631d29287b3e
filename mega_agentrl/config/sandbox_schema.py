"""Settings of the Python tool and of the sandboxes it runs in (`tool.python.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.choices import Isolation, PythonMode
from mega_agentrl.config.ranges import require

_AT_LEAST = {
    "hosts": 0,
    "workers": 1,
    "memory_mib": 64,
}


@dataclass
class PythonToolConfig:
    """The sandboxed interpreter.

    mode: stateless, each call a fresh interpreter (ARPO's); stateful, one per trajectory,
    forked where the trajectory is. workers: sandboxes kept warm, and calls that run at once.

    hosts: 0, the sandboxes are the driver's; n, they are those of n Ray actors, spread over the
    cluster's nodes, each with `workers` of its own. Where nodes are set apart for them
    (`ray start --resources='{"sandbox_host": 1}'`), they go to these only.

    Limits of a call. timeout_s: wall time; CPU time of its main process, threads together, and
    of each other process is limited to as much. memory_mib: address space of each process beyond
    the warm interpreter's; four times that is what all its processes with their files may hold,
    in a trajectory's branches together, where a control group can be written. Fixed are 4000
    characters of an answer, 64 processes, 256 open files for each, and 64 MiB of /tmp and of
    /dev/shm (`sandbox.pool`, `sandbox.inner.settings`).

    preload: modules imported once into every warm interpreter; the more it holds, the more
    each call's fork costs.
    """

    mode: PythonMode = PythonMode.stateless
    isolation: Isolation = Isolation.bubblewrap
    hosts: int = 0
    workers: int = 2
    timeout_s: float = 10.0
    memory_mib: int = 512
    preload: list[str] = field(default_factory=lambda: ["numpy", "sympy", "pandas"])

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "tool.python.timeout_s", self.timeout_s, "above 0")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            require(value >= least, f"tool.python.{name}", value, f"at least {least}")

    @property
    def total_memory_mib(self) -> int:
        """MiB of all processes of a sandbox together: a few at their limit, not all 64."""
        return 4 * self.memory_mib
