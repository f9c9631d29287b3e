"""Free TCP ports for servers that start some time after their port was chosen.

A port that the kernel picks (`bind` to 0) lies in the range from which it also takes the ports of
outgoing connections. Between the choice and the server's own `bind`, which may come after seconds
of imports, any connection of any process can take it. Ports below that range are taken only by
programs that ask for them.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST_PORT = 20_000
"""First candidate; Ray's workers listen on ports below it."""

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MIN_NUM_PORTS = 1000
_NUM_TRIES = 100


def free_port() -> int:
    """Return a TCP port that is free on all addresses of this host.

    It is below the kernel's range for outgoing connections, or inside it where that range begins
    too early or all tries found a port in use.
    """
    # The seed of a run is not used: two runs on one host would choose the same ports.
    generator = random.SystemRandom()
    end = _ephemeral_start()
    if end - FIRST_PORT >= _MIN_NUM_PORTS:
        for _ in range(_NUM_TRIES):
            port = generator.randrange(FIRST_PORT, end)
            if _bind(port) is not None:
                return port
    kernel_port = _bind(0)
    if kernel_port is None:
        raise OSError("this host has no free TCP port")
    return kernel_port


def free_ports(number: int) -> list[int]:
    """Return `number` different free ports, each from `free_port`."""
    ports: set[int] = set()
    while len(ports) < number:
        ports.add(free_port())
    return list(ports)


def _ephemeral_start() -> int:
    """Return the first port that the kernel gives to outgoing connections; 0 if unknown."""
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _bind(port: int) -> int | None:
    """Return the port that a socket was bound to for a moment; None if it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return None
        bound_port: int = probe.getsockname()[1]
        return bound_port
