"""Settings of the run's tools (`tool.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.config.search_schema import (
    BrowseToolConfig,
    CacheConfig,
    SearchToolConfig,
    WebConfig,
)


@dataclass
class ToolConfig:
    """The tools of the run.

    file: yaml list of tools of one's own, see `tool.own`; empty for none.
    """

    file: str = ""
    python: PythonToolConfig = field(default_factory=PythonToolConfig)
    search: SearchToolConfig = field(default_factory=SearchToolConfig)
    browse: BrowseToolConfig = field(default_factory=BrowseToolConfig)
    web: WebConfig = field(default_factory=WebConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
