"""Settings of the run's tools (`tool.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.ranges import require
from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.config.search_schema import BrowseToolConfig, CacheConfig, SearchToolConfig


@dataclass
class ToolConfig:
    """The tools of the run.

    file: yaml list of tools of one's own, see `tool.own`; empty for none.
    lifecycle_timeout_s: limit of making, forking, rewarding or freeing one tool's state.
    queue_timeout_s: limit of a call's wait for its turn, where a tool limits concurrent calls.
    """

    file: str = ""
    lifecycle_timeout_s: float = 60.0
    queue_timeout_s: float = 600.0
    python: PythonToolConfig = field(default_factory=PythonToolConfig)
    search: SearchToolConfig = field(default_factory=SearchToolConfig)
    browse: BrowseToolConfig = field(default_factory=BrowseToolConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        for key in ("lifecycle_timeout_s", "queue_timeout_s"):
            value = getattr(self, key)
            require(value > 0, f"tool.{key}", value, "above 0")
