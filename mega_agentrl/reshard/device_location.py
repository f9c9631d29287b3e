"""Discovery of the machine and device of this process.

Two containers on one machine count as two machines: a process cannot map the memory of a process
that it cannot see.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_agentrl.reshard.topology import RankLocation

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Machine and device of a process, comparable across processes."""

    host_id: str
    """Boot id and PID namespace, equal for processes that can see each other."""
    gpu_uuid: str | None = None
    """UUID of the current GPU, or None without one."""


def current_device_location() -> DeviceLocation:
    """Return the location of this process and its current device."""
    device = None
    if torch.cuda.is_available():
        device = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    host = f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return DeviceLocation(host, device)


def rank_locations(ranks: Sequence[DeviceLocation]) -> list[RankLocation]:
    """Number machines and devices in the order of first appearance."""
    hosts = list(dict.fromkeys(location.host_id for location in ranks))
    devices = list(
        dict.fromkeys(location.gpu_uuid for location in ranks if location.gpu_uuid is not None)
    )
    return [
        RankLocation(
            hosts.index(location.host_id),
            None if location.gpu_uuid is None else devices.index(location.gpu_uuid),
        )
        for location in ranks
    ]
