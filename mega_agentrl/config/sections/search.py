"""Settings of web tools (`tool.search.*`, `tool.browse.*`, `tool.web.*`, `tool.cache.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.sections.ranges import check_range

ANY_DOMAIN = "*"


@dataclass
class SearchToolConfig:
    """Search in a local corpus, a retrieval server or a web-search API."""

    backend: SearchBackend = SearchBackend.local
    """Kind of search."""
    source: str = ""
    """Documents to search: for `local` a JSONL file of documents with `id`, `title` and `text`
    (empty disables the tool), else the URL of the server or API."""
    api_key_env: str = ""
    """Environment variable that holds the API key, which is sent as `X-API-KEY` and as a bearer
    token; empty for none."""
    top_k: int = 1
    """Documents per answer."""

    def __post_init__(self) -> None:
        if self.backend is not SearchBackend.local:
            check_range(
                self.source.startswith(("http://", "https://")),
                "tool.search.source",
                self.source,
                f"http://... or https://... with tool.search.backend={self.backend}",
            )
        check_range(self.top_k >= 1, "tool.search.top_k", self.top_k, "at least 1")

    @property
    def is_enabled(self) -> bool:
        """Whether the run has the tool."""
        return self.backend is not SearchBackend.local or bool(self.source)


@dataclass
class BrowseToolConfig:
    """Read a page of the public web; private addresses are never read."""

    allowed_domains: list[str] = field(default_factory=list)
    """Domains, including subdomains, that may be read; `[*]` is all, empty disables the tool."""
    denied_domains: list[str] = field(default_factory=list)
    """Domains that may not be read; they take precedence."""

    def __post_init__(self) -> None:
        for key in ("allowed_domains", "denied_domains"):
            for name in getattr(self, key):
                is_wildcard = key == "allowed_domains" and self.allowed_domains == [ANY_DOMAIN]
                check_range(
                    is_wildcard
                    or (bool(name.strip(".")) and name.isascii() and not set(name) & set("/:*@ ")),
                    f"tool.browse.{key}",
                    name,
                    "a domain such as example.org in ASCII, without scheme, port, path, wildcard "
                    "(allowed_domains: or * alone)",
                )

    @property
    def is_enabled(self) -> bool:
        """Whether the run has the tool."""
        return bool(self.allowed_domains)

    @property
    def domain_filter(self) -> tuple[str, ...]:
        """The allowed domains; empty stands for all."""
        return () if self.allowed_domains == [ANY_DOMAIN] else tuple(self.allowed_domains)


@dataclass
class WebRequestConfig:
    """Limits of search and browse requests; each tool has its own."""

    timeout_s: float = 20.0
    """Timeout of a call, retries included."""
    max_calls_per_s: float = 10.0
    """Rate limit over all trajectories of the process; 0 is none. Local searches are not
    limited."""

    def __post_init__(self) -> None:
        check_range(self.timeout_s > 0, "tool.web.timeout_s", self.timeout_s, "above 0")
        rate = self.max_calls_per_s
        check_range(rate >= 0, "tool.web.max_calls_per_s", rate, "at least 0")


@dataclass
class ToolCacheConfig:
    """Cache of web answers in an SQLite file that the processes of a machine share."""

    path: str = "runs/tool_cache.sqlite"
    """Path of the file; empty disables the cache."""
