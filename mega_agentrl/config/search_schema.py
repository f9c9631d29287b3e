"""Settings of the search and browse tools and of their cache.

`tool.search.*`, `tool.browse.*`, `tool.cache.*`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.choices import SearchSource
from mega_agentrl.config.ranges import require


@dataclass
class SearchToolConfig:
    """Search in a local corpus, over a retrieval server, or over a web-search API.

    backend: see `SearchSource`. corpus: JSONL file of documents with `id`, `title` and `text`
    for `local`; empty leaves the tool out. index_dir: folder of the index made from it; empty
    is beside the corpus, or beside the cache where that cannot be written. url: of the server
    or API. key_env: environment variable that holds the API's key, empty for none; key_header:
    header it is sent in. top_k: documents per answer. snippet_tokens: of each document.
    timeout_s: per call, retries included. num_retries: further tries after a failure that may
    pass. calls_per_second: limit over all trajectories of the process, 0 for none.
    """

    backend: SearchSource = SearchSource.local
    corpus: str = ""
    index_dir: str = ""
    url: str = ""
    key_env: str = ""
    key_header: str = "X-API-KEY"
    top_k: int = 1
    snippet_tokens: int = 256
    timeout_s: float = 10.0
    num_retries: int = 2
    calls_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.backend is not SearchSource.local:
            require(
                self.url.startswith(("http://", "https://")),
                "tool.search.url",
                self.url,
                f"http://... or https://..., tool.search.backend={self.backend} needs it",
            )
        require(self.key_header != "", "tool.search.key_header", self.key_header, "a name")
        require(self.top_k >= 1, "tool.search.top_k", self.top_k, "at least 1")
        tokens = self.snippet_tokens
        require(tokens >= 4, "tool.search.snippet_tokens", tokens, "at least 4")
        _check_calls("tool.search", self)

    @property
    def enabled(self) -> bool:
        """True where the run has a search tool."""
        return self.backend is not SearchSource.local or bool(self.corpus)


@dataclass
class BrowseToolConfig:
    """Read one page of the public web; never a private address.

    allow: domains that may be read with those below them, empty for all; deny: those that may
    not, which wins. max_mib: of a page, beyond it is not read. answer_tokens: of an answer.
    timeout_s, num_retries, calls_per_second: as for `tool.search`.
    """

    enabled: bool = False
    allow: list[str] = field(default_factory=list)
    deny: list[str] = field(default_factory=list)
    max_mib: float = 2.0
    answer_tokens: int = 1024
    timeout_s: float = 20.0
    num_retries: int = 1
    calls_per_second: float = 10.0

    def __post_init__(self) -> None:
        for key in ("allow", "deny"):
            for name in getattr(self, key):
                require(
                    bool(name.strip(".")) and name.isascii() and not set(name) & set("/:*@ "),
                    f"tool.browse.{key}",
                    name,
                    "a domain such as example.org in ASCII, without scheme, port, path, wildcard",
                )
        require(0 < self.max_mib <= 64, "tool.browse.max_mib", self.max_mib, "in (0, 64]")
        tokens = self.answer_tokens
        require(tokens >= 16, "tool.browse.answer_tokens", tokens, "at least 16")
        _check_calls("tool.browse", self)


@dataclass
class CacheConfig:
    """Answers of the web, kept in one SQLite file that processes of one machine share.

    path: of the file; empty keeps nothing. ttl_s: an entry is used as long as it is younger,
    0 for ever. size_mib: bound of the file; beyond it the least recently used go.
    """

    path: str = "runs/tool_cache.sqlite"
    ttl_s: float = 7 * 24 * 3600.0
    size_mib: int = 1024

    def __post_init__(self) -> None:
        require(self.ttl_s >= 0, "tool.cache.ttl_s", self.ttl_s, "at least 0")
        require(self.size_mib >= 1, "tool.cache.size_mib", self.size_mib, "at least 1")


def _check_calls(section: str, config: SearchToolConfig | BrowseToolConfig) -> None:
    require(config.timeout_s > 0, f"{section}.timeout_s", config.timeout_s, "above 0")
    require(config.num_retries >= 0, f"{section}.num_retries", config.num_retries, "at least 0")
    rate = config.calls_per_second
    require(rate >= 0, f"{section}.calls_per_second", rate, "at least 0")
