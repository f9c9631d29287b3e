"""Settings of the run's tools (`tool.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.ranges import require
from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.config.search_schema import (
    BrowseToolConfig,
    CacheConfig,
    SearchToolConfig,
    WebConfig,
)

_LEAST_TOKENS = 4
"""Of a document: a word or two and the ellipsis."""


@dataclass
class ToolConfig:
    """The tools of the run.

    file: yaml list of tools of one's own, see `tool.own`; empty for none. answer_tokens: of the
    text of an answer of search or browse; a search shares them between `search.top_k` documents.
    """

    file: str = ""
    answer_tokens: int = 1024
    python: PythonToolConfig = field(default_factory=PythonToolConfig)
    search: SearchToolConfig = field(default_factory=SearchToolConfig)
    browse: BrowseToolConfig = field(default_factory=BrowseToolConfig)
    web: WebConfig = field(default_factory=WebConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        least = max(16, _LEAST_TOKENS * self.search.top_k)
        require(
            self.answer_tokens >= least,
            "tool.answer_tokens",
            self.answer_tokens,
            f"at least {least}, {_LEAST_TOKENS} for each of tool.search.top_k={self.search.top_k} "
            "documents",
        )
