"""Settings of the tools (`tool.*`): Python sandboxes, search, browsing, zoom and the web cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mega_agentrl.config.enums import PythonMode, SandboxIsolation, SearchBackend
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.ranges import MAX_TIMEOUT_S, MAX_TOKENS, Range, Section

ANY_DOMAIN = "*"
HOST_ROOT = "host"
"""Value of `tool.workspace.root` for the machine's own system."""
_MIN_TOKENS_PER_DOCUMENT = 4
"""Room for a word or two and the ellipsis."""


@dataclass
class PythonToolConfig(Section, key="tool.python"):
    """The sandboxed Python interpreter.

    Fixed limits are 4000 characters of output, 64 processes, 256 open files per process, and 64 MiB
    each of /tmp and /dev/shm.
    """

    mode: PythonMode = PythonMode.stateless
    """stateless: each call has a fresh interpreter, as in ARPO; stateful: one interpreter per
    trajectory, which forks with it."""
    isolation: SandboxIsolation = SandboxIsolation.bubblewrap
    """Isolation of sandboxed code from this machine."""
    num_hosts: Annotated[int, Range(at_least=0, at_most=65_536)] = 0
    """Ray actors that run sandboxes, spread over the nodes of the cluster; 0 runs them on the
    driver. They use only nodes with the resource `sandbox_host` if there are any (`ray start
    --resources='{"sandbox_host": 1}'`)."""
    num_workers: Annotated[int, Range(at_least=1, at_most=4096)] = 2
    """Warm sandboxes, and concurrent calls, of each host."""
    timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 10.0
    """Wall-clock limit of a call; also the CPU-time limit of each of its processes."""
    memory_limit_mib: Annotated[int, Range(at_least=64, at_most=16_777_216, unit="MiB")] = 512
    """Address-space limit of a process beyond the warm interpreter. All processes and files of a
    trajectory and its forks are limited to four times as much where a control group can be
    created."""
    preload_modules: list[str] = field(default_factory=lambda: ["numpy", "sympy", "pandas"])
    """Modules imported once in every warm interpreter; more modules make forks slower."""

    @property
    def total_memory_mib(self) -> int:
        """Memory limit of a whole sandbox, too low for all 64 processes to reach their own."""
        return 4 * self.memory_limit_mib


@dataclass
class WorkspaceToolConfig(Section, key="tool.workspace"):
    """The tools `bash` and `edit`, which act on a workspace of the trajectory that forks with it.

    Fixed limits are 8000 characters of output, 1024 open files per process, 200000 files in what a
    workspace writes, and 1 MiB of shell state.
    """

    root: str = ""
    """Root file system: a folder that holds one, an OCI image (a folder with an `oci-layout`, or a
    .tar file of one; unpacked with `skopeo` and `umoci`), or `host` for this machine's own /usr,
    read-only. Empty disables the tools."""
    folder: str = ""
    """Project folder, for example a git repository, that appears writable at /workspace; it is
    itself never changed. Empty for an empty /workspace."""
    setup_command: str = ""
    """Command that runs in every new workspace before the policy's first call; it must succeed.
    Empty for none. A prompt's `create_kwargs` may have another one."""
    reward_command: str = ""
    """Command that gives a finished trajectory the reward 1.0 if it succeeds, else 0.0. It runs in
    a new shell in the workspace, with an empty home folder, after all other processes have been
    ended; `/sandbox/folder` is the project folder as it was. Empty for no reward. A prompt's
    `create_kwargs` may have another one."""
    num_workers: Annotated[int, Range(at_least=1, at_most=4096)] = 2
    """Concurrent calls, and sandboxes that share the workspaces."""
    timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 60.0
    """Wall-clock limit of a call."""
    reward_timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 300.0
    """Limit of the setup command, and of the reward command, which gives 0.0 if it is exceeded. The
    larger of this and `timeout_s` is the CPU-time limit of each process."""
    memory_limit_mib: Annotated[int, Range(at_least=64, at_most=16_777_216, unit="MiB")] = 4096
    """Memory of all processes and written files of a trajectory and its forks together, where a
    control group can be created; else the address space of each process."""
    disk_limit_mib: Annotated[int, Range(at_least=1, at_most=16_777_216, unit="MiB")] = 1024
    """Size of what a workspace writes, in memory, /tmp and /dev/shm included; also the largest
    file."""
    num_processes: Annotated[int, Range(at_least=8, at_most=32_768)] = 256
    """Processes and threads of a workspace."""

    @property
    def is_enabled(self) -> bool:
        """Whether the run has the tools."""
        return bool(self.root)


@dataclass
class SearchToolConfig(Section, key="tool.search"):
    """Search in a local corpus, a retrieval server or a web-search API."""

    backend: SearchBackend = SearchBackend.local
    """Kind of search."""
    source: str = ""
    """Documents to search: for `local` a JSONL file of documents with `id`, `title` and `text`
    (empty disables the tool), else the URL of the server or API."""
    api_key_env: str = ""
    """Environment variable that holds the API key, which is sent as `X-API-KEY` and as a bearer
    token; empty for none."""
    top_k: Annotated[int, Range(at_least=1, at_most=1000)] = 1
    """Documents per answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is not SearchBackend.local:
            check_range(
                self.source.startswith(("http://", "https://")),
                "tool.search.source",
                self.source,
                f"http://... or https://... with tool.search.backend={self.backend}",
            )

    @property
    def is_enabled(self) -> bool:
        """Whether the run has the tool."""
        return self.backend is not SearchBackend.local or bool(self.source)


@dataclass
class BrowseToolConfig(Section, key="tool.browse"):
    """Read a page of the public web; private addresses are never read."""

    allowed_domains: list[str] = field(default_factory=list)
    """Domains, including subdomains, that may be read; `[*]` is all, empty disables the tool."""
    denied_domains: list[str] = field(default_factory=list)
    """Domains that may not be read; they take precedence."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
class ZoomToolConfig(Section, key="tool.zoom"):
    """Enlarge a region of an image, for a vision-language model."""

    enabled: bool = False
    """Whether the run has the tool."""
    min_side: Annotated[int, Range(at_least=1, at_most=16_384, unit="pixels")] = 224
    """Length to which the shorter side of a region is enlarged, as far as `tool.zoom.max_side`
    permits, unless the call has a scale."""
    max_side: Annotated[int, Range(at_least=1, at_most=16_384, unit="pixels")] = 1024
    """Maximum length of the longer side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            self.min_side <= self.max_side,
            "tool.zoom.min_side",
            self.min_side,
            f"at most tool.zoom.max_side={self.max_side}",
        )


@dataclass
class WebRequestConfig(Section, key="tool.web"):
    """Limits of search and browse requests; each tool has its own."""

    timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 20.0
    """Timeout of a call, retries included."""
    max_calls_per_s: Annotated[float, Range(at_least=0, at_most=1_000_000, unit="1/s")] = 10.0
    """Rate limit over all trajectories of the process; 0 is none. Local searches are not
    limited."""


@dataclass
class ToolCacheConfig(Section, key="tool.cache"):
    """Cache of web answers in an SQLite file that the processes of a machine share."""

    path: str = "runs/tool_cache.sqlite"
    """Path of the file; empty disables the cache."""


@dataclass
class ToolConfig(Section, key="tool"):
    """The tools of the run."""

    user_tools_file: str = ""
    """Yaml list of user tools; empty for none."""
    mcp: str = ""
    """JSON file of MCP servers, `{"mcpServers": {...}}`, whose tools the run gets; empty for
    none."""
    max_response_tokens: Annotated[int, Range(at_least=16, at_most=MAX_TOKENS, unit="tokens")] = (
        1024
    )
    """Maximum length of an answer of search, browse or an MCP server; the documents of a search
    share it."""
    python: PythonToolConfig = field(default_factory=PythonToolConfig)
    """Python interpreter."""
    workspace: WorkspaceToolConfig = field(default_factory=WorkspaceToolConfig)
    """Shell and file editor in a workspace."""
    search: SearchToolConfig = field(default_factory=SearchToolConfig)
    """Search."""
    browse: BrowseToolConfig = field(default_factory=BrowseToolConfig)
    """Browser."""
    zoom: ZoomToolConfig = field(default_factory=ZoomToolConfig)
    """Zoom into images."""
    web: WebRequestConfig = field(default_factory=WebRequestConfig)
    """Limits of web requests."""
    cache: ToolCacheConfig = field(default_factory=ToolCacheConfig)
    """Cache of web answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = _MIN_TOKENS_PER_DOCUMENT * self.search.top_k
        check_range(
            self.max_response_tokens >= least,
            "tool.max_response_tokens",
            self.max_response_tokens,
            f"at least {least}, {_MIN_TOKENS_PER_DOCUMENT} for each of "
            f"tool.search.top_k={self.search.top_k} documents",
        )
