"""Placement of ranks, and the type of link between two of them.

    same_gpu    two processes on one device: a copy in its memory
    same_node   two devices of one machine: NVLink, PCIe or host memory
    network     two machines

Speeds are per rank and direction. The three link types are assumed not to share bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mega_agentrl.errors import InputError


class LinkType(StrEnum):
    """Type of the link between two ranks, fastest first."""

    same_gpu = "same_gpu"
    same_node = "same_node"
    network = "network"


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Machine and device of a rank."""

    node: int
    """Index of the machine."""
    device: int | None = None
    """Index of the GPU over all machines, or None for a rank without one."""


def link_type_between(first: RankLocation, second: RankLocation) -> LinkType:
    """Return the type of the link between two ranks."""
    if first.node != second.node:
        return LinkType.network
    is_same_gpu = first.device is not None and first.device == second.device
    return LinkType.same_gpu if is_same_gpu else LinkType.same_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Bytes per second that a rank can send, and at the same time receive, over each link type.

    The defaults describe an H100 node: copies in HBM, NVLink, one 400 Gb/s port per GPU.
    """

    same_gpu: float = 1.5e12
    same_node: float = 400e9
    network: float = 50e9

    def __post_init__(self) -> None:
        for link in LinkType:
            if not getattr(self, link) > 0:
                raise InputError(link, getattr(self, link), "more than 0")

    def transfer_s(self, link: LinkType, num_bytes: int) -> float:
        """Return the seconds that one transfer takes on an otherwise idle link."""
        speed: float = getattr(self, link)
        return num_bytes / speed
