"""Where ranks stand and what lies between two of them.

    same_gpu    two processes on one device: a copy in its memory
    same_node   two devices of one machine: NVLink, PCIe or host memory
    network     two machines

Speeds are per rank and direction; the three classes are taken as independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Link(StrEnum):
    """Class of the way between two ranks, nearest first."""

    same_gpu = "same_gpu"
    same_node = "same_node"
    network = "network"


@dataclass(frozen=True, slots=True)
class Location:
    """node: number of the machine. device: of the GPU in it; None where ranks share none."""

    node: int
    device: int | None = None


def link_between(one: Location, other: Location) -> Link:
    """The class of link between two ranks."""
    if one.node != other.node:
        return Link.network
    shared = one.device is not None and one.device == other.device
    return Link.same_gpu if shared else Link.same_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Bytes per second that a rank sends, and at the same time receives, over each class.

    The defaults are those of a node of H100s: copies in HBM, NVLink, one 400 Gb/s port a GPU.
    """

    same_gpu: float = 1.5e12
    same_node: float = 400e9
    network: float = 50e9

    def __post_init__(self) -> None:
        for link in Link:
            if not getattr(self, link) > 0:
                raise ValueError(f"LinkSpeeds: {link}={getattr(self, link)}, expected more than 0")

    def seconds(self, link: Link, num_bytes: int) -> float:
        """Time of one transfer alone on its link."""
        speed: float = getattr(self, link)
        return num_bytes / speed
