"""Settings of the gateway. This module imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from mega_agentrl.config.errors import check_range


@dataclass(slots=True, kw_only=True, frozen=True)
class GatewaySettings:
    """Address and bounds of the gateway: the block `gateway` of `rollout.agent`."""

    host: str = "127.0.0.1"
    """Interface; another one only for agents on other nodes, in a network that you trust."""
    port: int = 0
    """Port; 0 is a free one."""
    max_body_mib: int = 64
    """Maximum size of a request body."""
    max_sessions: int = 65_536
    """Maximum number of open sessions."""

    def __post_init__(self) -> None:
        key = "rollout.agent.gateway"
        check_range(0 <= self.port < 65_536, f"{key}.port", self.port, "a port, or 0")
        for name in ("max_body_mib", "max_sessions"):
            value = getattr(self, name)
            check_range(value >= 1, f"{key}.{name}", value, "at least 1")
