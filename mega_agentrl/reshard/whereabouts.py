"""Which machine and which device this process is on, and what that makes of the links.

Two containers of a machine count as two machines: neither finds the other's processes, which
mapping their memory needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_agentrl.reshard.links import Location

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """host: the same for all processes that see each other. device: of the GPU, None without."""

    host: str
    device: str | None = None


def here() -> Whereabouts:
    """Of this process and its current device."""
    device = None
    if torch.cuda.is_available():
        device = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    host = f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return Whereabouts(host, device)


def locations(ranks: Sequence[Whereabouts]) -> list[Location]:
    """Machines and devices numbered in the order in which they first appear."""
    hosts = list(dict.fromkeys(at.host for at in ranks))
    devices = list(dict.fromkeys(at.device for at in ranks if at.device is not None))
    return [
        Location(hosts.index(at.host), None if at.device is None else devices.index(at.device))
        for at in ranks
    ]
