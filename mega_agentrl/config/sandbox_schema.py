"""Settings of the Python tool and of the sandboxes it runs in (`tool.python.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.choices import Isolation, PythonMode
from mega_agentrl.config.ranges import require

_BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")
_AT_LEAST = {
    "hosts": 0,
    "workers": 1,
    "memory_mib": 64,
    "output_chars": 16,
}


@dataclass
class PythonToolConfig:
    """The sandboxed interpreter.

    mode: stateless, each call a fresh interpreter (ARPO's); stateful, one per trajectory,
    forked where the trajectory is. workers: sandboxes kept warm, and calls that run at once.

    hosts: 0, the sandboxes are the driver's; n, they are those of n Ray actors, spread over the
    cluster's nodes, each with `workers` of its own. host_resource: a custom resource that the
    nodes for them offer (`ray start --resources='{"cpu_node": 1}'`) and of which each host
    takes 1; empty, any node.

    Limits of a call. timeout_s: wall time. cpu_s: CPU time of its main process, threads
    together, and of each other process. memory_mib: address space of each process beyond the
    warm interpreter's; four times that is what all its processes with their files may hold, in a
    trajectory's branches together, where a control group can be written. output_chars: an
    answer beyond it is cut with a note. Fixed are 64 processes, 256 open files for each, and 64
    MiB of /tmp and of /dev/shm (`sandbox.inner.settings`).

    preload: modules imported once into every warm interpreter; the more it holds, the more
    each call's fork costs.
    """

    mode: PythonMode = PythonMode.stateless
    isolation: Isolation = Isolation.bubblewrap
    hosts: int = 0
    host_resource: str = ""
    workers: int = 2
    timeout_s: float = 10.0
    cpu_s: float = 20.0
    memory_mib: int = 512
    output_chars: int = 4000
    preload: list[str] = field(default_factory=lambda: ["numpy", "sympy", "pandas"])

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "tool.python.timeout_s", self.timeout_s, "above 0")
        require(self.cpu_s >= 1, "tool.python.cpu_s", self.cpu_s, ">= 1")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            require(value >= least, f"tool.python.{name}", value, f"at least {least}")
        resource = self.host_resource
        require(
            resource not in _BUILT_IN and resource == resource.strip(),
            "tool.python.host_resource",
            repr(resource),
            f"a name of the cluster's own, without spaces around it and none of {_BUILT_IN}",
        )
        require(
            self.hosts > 0 or not resource,
            "tool.python.host_resource",
            repr(resource),
            "tool.python.hosts above 0 with it, or none",
        )

    @property
    def total_memory_mib(self) -> int:
        """MiB of all processes of a sandbox together: a few at their limit, not all 64."""
        return 4 * self.memory_mib
