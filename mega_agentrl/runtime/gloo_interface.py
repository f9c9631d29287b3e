"""Network interface of the gloo process groups of a process.

Unless `GLOO_SOCKET_IFNAME` names an interface, gloo listens on the address that the host name
resolves to. On Debian that is 127.0.1.1, and on a node with several networks any of them, so that
ranks on different nodes wait for each other until the deadline. The interface that has the node's
Ray address reaches all other nodes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def use_interface_of(address: str) -> str:
    """Let gloo use the interface with IPv4 address `address`, unless the user has chosen one.

    Child processes inherit the choice.

    Returns:
        The names of the interfaces in use; empty if no interface has the address, and gloo uses
        the address of the host name.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := _find_interface(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def _find_interface(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
