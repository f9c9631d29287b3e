"""Settings of the Python tool and of the sandboxes it runs in (`tool.python.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.ranges import require


@dataclass
class PythonToolConfig:
    """The sandboxed interpreter.

    workers: interpreters kept warm. timeout_s: wall time of one call. output_chars: an
    answer beyond it is cut with a note. preload: modules imported once into every warm
    interpreter; the more it holds, the more each call's fork costs.
    """

    workers: int = 2
    timeout_s: float = 10.0
    memory_mib: int = 512
    output_chars: int = 4000
    preload: list[str] = field(default_factory=lambda: ["numpy", "sympy"])

    def __post_init__(self) -> None:
        require(self.workers >= 1, "tool.python.workers", self.workers, "at least 1")
        require(self.timeout_s > 0, "tool.python.timeout_s", self.timeout_s, "above 0")
        require(self.memory_mib >= 64, "tool.python.memory_mib", self.memory_mib, ">= 64")
        require(self.output_chars >= 16, "tool.python.output_chars", self.output_chars, ">= 16")
