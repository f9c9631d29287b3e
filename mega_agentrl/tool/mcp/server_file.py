"""Reads the file of `tool.mcp`, in the form that every MCP client reads.

A server has `command`, `args`, `env` and `cwd`, or `url` and `headers`. `${NAME}` in the values of
`env` and `headers` stands for an environment variable. Our own keys, all optional::

    per_trajectory   whether each trajectory has a server of its own; default: with a command
    network          none or host, of a command; default: none
    isolation        bubblewrap or none, of a command; default: bubblewrap
    read_only        folders and files that a command may read, relative to the file
    timeout_s        limit of one call; default: 60
    include, exclude names of the server's tools that the run gets, or does not get

`cwd` is relative to the file as well, may be read, and is where a command starts. Keys that steer
the user interface of other clients are ignored. Every error is a `ConfigError` whose key has file,
server and key. What `${NAME}` stands for is a secret, which no message contains.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from mega_agentrl.config.enums import NetworkAccess, SandboxIsolation
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.input_files import read_json
from mega_agentrl.config.override_keys import nearest_name
from mega_agentrl.config.ranges import MAX_TIMEOUT_S, FieldType, Range
from mega_agentrl.sandbox.isolation import interpreter_folders

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

KEY = "tool.mcp"

DEFAULT_TIMEOUT_S = 60.0
_MIN_SECRET_CHARS = 6
"""Shorter values are words such as `true`, which an error message may contain by chance."""

_COMMAND_KEYS = ("command", "args", "env", "cwd", "network", "isolation", "read_only")
_URL_KEYS = ("url", "headers")
_SHARED_KEYS = ("type", "disabled", "per_trajectory", "timeout_s", "include", "exclude")
_IGNORED_KEYS = ("alwaysAllow", "autoApprove", "description", "icon", "timeout", "trust")
_COMMAND_TYPES = ("stdio",)
_URL_TYPES = ("http", "streamable-http", "streamableHttp", "streamable_http")
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_SERVER_NAME = re.compile(r"[\w .@/-]{1,64}")
_SANDBOX_FOLDERS = ("/tmp", "/dev", "/proc")
"""Folders that every sandbox has itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServerConfig:
    """A server of the file."""

    name: str
    """Its name in the file."""
    key: str
    """`tool.mcp=FILE, server NAME`, for errors."""
    command: tuple[str, ...] = ()
    """Program and arguments; empty for a server with a URL."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the command."""
    working_folder: Path = Path("/tmp")
    """Where the command starts."""
    read_only: tuple[Path, ...] = ()
    """What the command may read."""
    network: NetworkAccess = NetworkAccess.none
    """Network of the command."""
    isolation: SandboxIsolation = SandboxIsolation.bubblewrap
    """Isolation of the command."""
    url: str = ""
    """Address of a server over streamable HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of each request."""
    per_trajectory: bool = True
    """Whether each trajectory has a server, or a session with the URL, of its own."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Limit of one call."""
    include: tuple[str, ...] | None = None
    """Names of the tools to use; None for all."""
    exclude: tuple[str, ...] = ()
    """Names of the tools not to use."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Texts that no message may contain."""

    @property
    def origin(self) -> str:
        """The program or the URL without its query, for messages."""
        return self.command[0] if self.command else self.url.partition("?")[0]

    @property
    def has_replayable_state(self) -> bool:
        """Whether calls can be made again on another server without effects outside of it."""
        is_isolated = self.isolation is not SandboxIsolation.none
        return bool(self.command) and is_isolated and self.network is NetworkAccess.none

    def redact(self, text: str) -> str:
        """Return the text without the values that `${NAME}` stands for."""
        for secret in self.secrets:
            text = text.replace(secret, "[hidden]")
        return text


def read_server_file(path: Path, variables: Mapping[str, str]) -> list[McpServerConfig]:
    """Return the servers of the file that are not disabled.

    Args:
        path: The file.
        variables: Environment variables that `${NAME}` may name.

    Raises:
        ConfigError: The file has a mistake.
    """
    expected = 'a JSON object {"mcpServers": {NAME: {"command": ...} or {"url": ...}}}'
    if not path.is_file():
        raise ConfigError(KEY, str(path), expected, "there is no such file")
    content = read_json(path, KEY, expected)
    servers = content.get("mcpServers")
    if not isinstance(servers, dict) or not servers:
        cause = "the key is `servers` in some editors" if "servers" in content else ""
        raise ConfigError(KEY, str(path), expected, cause or f"its keys are {sorted(content)}")
    entries = [_ServerEntry(path, name, values, variables) for name, values in servers.items()]
    configs = [entry.parse() for entry in entries if not entry.is_disabled]
    check_range(bool(configs), KEY, str(path), "at least one server that is not disabled")
    return configs


class _ServerEntry:
    """One entry of the file, and the checks of its keys."""

    def __init__(self, path: Path, name: str, values: object, variables: Mapping[str, str]) -> None:
        self._folder = path.resolve().parent
        self._name = name
        self._key = f"{KEY}={path}, server {name}"
        self._variables = variables
        self._secrets: dict[str, None] = {}
        check_range(
            bool(_SERVER_NAME.fullmatch(name)),
            f"{KEY}={path}, mcpServers",
            name,
            "a name of 1 to 64 letters, digits, spaces and any of _.@/-",
        )
        if not isinstance(values, dict):
            raise ConfigError(self._key, type(values).__name__, "an object")
        self._values: dict[str, Any] = values
        self._check_keys()

    @property
    def is_disabled(self) -> bool:
        """Whether the entry is switched off."""
        return bool(self._get("disabled", bool, False))

    def parse(self) -> McpServerConfig:
        """Return the server; raises `ConfigError`."""
        return self._parse_command() if "command" in self._values else self._parse_url()

    def _check_keys(self) -> None:
        values = self._values
        kinds = [name for name in ("command", "url") if name in values]
        if len(kinds) != 1:
            raise ConfigError(self._key, kinds or sorted(values), "either command or url")
        known = (*(_COMMAND_KEYS if kinds == ["command"] else _URL_KEYS), *_SHARED_KEYS)
        for name in values:
            if name not in (*known, *_IGNORED_KEYS):
                cause = f"nearest is {nearest_name(name, known)}"
                raise ConfigError(self._key, name, f"only the keys {', '.join(known)}", cause)
        types = _COMMAND_TYPES if kinds == ["command"] else _URL_TYPES
        if (kind := self._get("type", str, types[0])) not in types:
            cause = "the transport sse was replaced by streamable HTTP" if kind == "sse" else ""
            raise ConfigError(f"{self._key}, type", kind, " or ".join(types), cause)

    def _parse_command(self) -> McpServerConfig:
        command = (self._get("command", str, ""), *self._get_texts("args"))
        check_range(bool(command[0]), f"{self._key}, command", "", "a program")
        environment = self._get_values("env")
        isolation = self._get_choice("isolation", SandboxIsolation, SandboxIsolation.bubblewrap)
        read_only = [self._get_path("read_only", text) for text in self._get_texts("read_only")]
        working_folder = Path("/tmp")
        if folder := self._get("cwd", str, ""):
            working_folder = self._get_path("cwd", folder)
            read_only.append(working_folder)
        if isolation is not SandboxIsolation.none:
            self._check_visible(command, read_only)
        return McpServerConfig(
            command=command,
            environment=environment,
            working_folder=working_folder,
            read_only=tuple(dict.fromkeys(read_only)),
            network=self._get_choice("network", NetworkAccess, NetworkAccess.none),
            isolation=isolation,
            per_trajectory=self._get("per_trajectory", bool, True),
            **self._shared_options(),
        )

    def _parse_url(self) -> McpServerConfig:
        url = self._get("url", str, "")
        parts = urlsplit(url)
        check_range(
            parts.scheme in ("http", "https") and bool(parts.netloc) and "@" not in parts.netloc,
            f"{self._key}, url",
            parts._replace(query="", netloc=parts.netloc.rpartition("@")[2]).geturl(),
            "http://HOST/... or https://HOST/... without user and password",
        )
        return McpServerConfig(
            url=url,
            headers=self._get_values("headers"),
            per_trajectory=self._get("per_trajectory", bool, False),
            **self._shared_options(),
        )

    def _shared_options(self) -> dict[str, Any]:
        timeout_s = self._values.get("timeout_s", DEFAULT_TIMEOUT_S)
        bounds = Range(above=0, at_most=MAX_TIMEOUT_S)
        FieldType(kind=float, bounds=bounds).check(timeout_s, f"{self._key}, timeout_s")
        return {
            "name": self._name,
            "key": self._key,
            "timeout_s": float(timeout_s),
            "include": self._get_texts("include") if "include" in self._values else None,
            "exclude": self._get_texts("exclude"),
            # Longer ones first, because one may be a part of another.
            "secrets": tuple(sorted(self._secrets, key=len, reverse=True)),
        }

    def _get(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(name, default)
        if type(value) is not kind:
            got = type(value).__name__
            raise ConfigError(f"{self._key}, {name}", got, f"a value of the type {kind.__name__}")
        return value

    def _get_choice(self, name: str, kind: type[ChoiceT], default: ChoiceT) -> ChoiceT:
        value = self._get(name, str, default.value)
        check_range(value in list(kind), f"{self._key}, {name}", value, " or ".join(kind))
        return kind(value)

    def _get_texts(self, name: str) -> tuple[str, ...]:
        values = self._get(name, list, [])
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{self._key}, {name}", "other values", "a list of texts")
        return tuple(values)

    def _get_values(self, name: str) -> dict[str, str]:
        """Return `env` or `headers` with variables replaced.

        What holds a variable is a secret. A literal value is none: it may be a word or a path that
        the policy has to read in an answer.
        """
        values = {}
        for key, template in self._get(name, dict, {}).items():
            where = f"{self._key}, {name}.{key}"
            if not isinstance(template, str) or "\0" in template:
                raise ConfigError(where, type(template).__name__, "a text")

            def replace(match: re.Match[str], where: str = where) -> str:
                value = self._variables.get(match[1])
                if value is None:
                    expected = "a variable of the environment in which the run is started"
                    raise ConfigError(where, f"${{{match[1]}}}", expected, "it is not set")
                self._add_secret(value)
                return value

            values[key] = _VARIABLE.sub(replace, template)
            if values[key] != template:
                self._add_secret(values[key])
        return values

    def _add_secret(self, value: str) -> None:
        if len(value) >= _MIN_SECRET_CHARS:
            self._secrets[value] = None

    def _get_path(self, name: str, text: str) -> Path:
        path = Path(os.path.abspath(self._folder / Path(text).expanduser()))
        check_range(path.exists(), f"{self._key}, {name}", str(path), "a path that exists")
        return path

    def _check_visible(self, command: Iterable[str], read_only: Iterable[Path]) -> None:
        """Refuse an argument that is a path of the host which the sandbox does not have."""
        python = Path(sys.prefix)
        visible = [Path("/usr"), python, python.resolve(), *interpreter_folders(), *read_only]
        visible += [Path("/", name) for name in ("bin", "sbin", "lib", "lib64")]
        for text in command:
            path = Path(text)
            if not path.is_absolute() or len(path.parts) < 2 or text in _SANDBOX_FOLDERS:
                continue
            if not any(path.is_relative_to(folder) for folder in visible) and _exists(path):
                folder = path if path.is_dir() else path.parent
                raise ConfigError(
                    f"{self._key}, args",
                    text,
                    "a path that the sandbox has",
                    f'add "read_only": ["{folder}"]; the sandbox has /usr, this Python and what '
                    "read_only and cwd name, and a /tmp of its own",
                )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False
