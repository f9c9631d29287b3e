"""Settings of the search and browse tools, of their calls and of their cache.

`tool.search.*`, `tool.browse.*`, `tool.web.*`, `tool.cache.*`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.choices import SearchSource
from mega_agentrl.config.ranges import require

EVERY_DOMAIN = "*"


@dataclass
class SearchToolConfig:
    """Search in a local corpus, over a retrieval server, or over a web-search API.

    backend: see `SearchSource`. source: where it looks, for `local` a JSONL file of documents with
    `id`, `title` and `text` (empty leaves the tool out), else the address of the server or API.
    key_env: environment variable that holds the API's key, empty for none; it is sent as
    `X-API-KEY` and as a bearer token. top_k: documents per answer.
    """

    backend: SearchSource = SearchSource.local
    source: str = ""
    key_env: str = ""
    top_k: int = 1

    def __post_init__(self) -> None:
        if self.backend is not SearchSource.local:
            require(
                self.source.startswith(("http://", "https://")),
                "tool.search.source",
                self.source,
                f"http://... or https://..., tool.search.backend={self.backend} needs it",
            )
        require(self.top_k >= 1, "tool.search.top_k", self.top_k, "at least 1")

    @property
    def enabled(self) -> bool:
        """True where the run has a search tool."""
        return self.backend is not SearchSource.local or bool(self.source)


@dataclass
class BrowseToolConfig:
    """Read one page of the public web; never a private address.

    allow: domains that may be read with those below them, [*] for all; empty leaves the tool out.
    deny: those that may not be read, which wins.
    """

    allow: list[str] = field(default_factory=list)
    deny: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key in ("allow", "deny"):
            for name in getattr(self, key):
                everything = key == "allow" and self.allow == [EVERY_DOMAIN]
                require(
                    everything
                    or (bool(name.strip(".")) and name.isascii() and not set(name) & set("/:*@ ")),
                    f"tool.browse.{key}",
                    name,
                    "a domain such as example.org in ASCII, without scheme, port, path, wildcard "
                    "(allow: or * alone)",
                )

    @property
    def enabled(self) -> bool:
        """True where the run has the tool."""
        return bool(self.allow)

    @property
    def only(self) -> tuple[str, ...]:
        """The domains of `allow`; none stands for all."""
        return () if self.allow == [EVERY_DOMAIN] else tuple(self.allow)


@dataclass
class WebConfig:
    """Calls of search and browse; the two count apart.

    timeout_s: per call, retries included. calls_per_second: limit over all trajectories of the
    process, 0 for none; searches of a local corpus are not limited.
    """

    timeout_s: float = 20.0
    calls_per_second: float = 10.0

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "tool.web.timeout_s", self.timeout_s, "above 0")
        rate = self.calls_per_second
        require(rate >= 0, "tool.web.calls_per_second", rate, "at least 0")


@dataclass
class CacheConfig:
    """Answers of the web, kept in one SQLite file that processes of one machine share.

    path: of the file; empty keeps nothing. How long and how much: `tool.cache`.
    """

    path: str = "runs/tool_cache.sqlite"
