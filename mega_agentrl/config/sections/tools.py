"""Settings of the tools (`tool.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.sections.ranges import check_range
from mega_agentrl.config.sections.sandbox import PythonToolConfig
from mega_agentrl.config.sections.search import (
    BrowseToolConfig,
    SearchToolConfig,
    ToolCacheConfig,
    WebRequestConfig,
)

_MIN_TOKENS_PER_DOCUMENT = 4
"""Room for a word or two and the ellipsis."""


@dataclass
class ToolConfig:
    """The tools of the run."""

    user_tools_file: str = ""
    """Yaml list of user tools; empty for none."""
    max_response_tokens: int = 1024
    """Maximum length of an answer of search or browse; the documents of a search share it."""
    python: PythonToolConfig = field(default_factory=PythonToolConfig)
    """Python interpreter."""
    search: SearchToolConfig = field(default_factory=SearchToolConfig)
    """Search."""
    browse: BrowseToolConfig = field(default_factory=BrowseToolConfig)
    """Browser."""
    web: WebRequestConfig = field(default_factory=WebRequestConfig)
    """Limits of web requests."""
    cache: ToolCacheConfig = field(default_factory=ToolCacheConfig)
    """Cache of web answers."""

    def __post_init__(self) -> None:
        least = max(16, _MIN_TOKENS_PER_DOCUMENT * self.search.top_k)
        check_range(
            self.max_response_tokens >= least,
            "tool.max_response_tokens",
            self.max_response_tokens,
            f"at least {least}, {_MIN_TOKENS_PER_DOCUMENT} for each of "
            f"tool.search.top_k={self.search.top_k} documents",
        )
