"""What a trainer rank and a plain rollout rank run on their GPUs, in processes of
`tests.reshard.wire.ranks`. CUDA starts with the first of these, after `device` has been set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.proof import Regions, Witness
from mega_agentrl.reshard.transport import join
from mega_agentrl.reshard.whereabouts import here
from tests.reshard.faults import cut

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.reshard.delivery import Place
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.proof import Region
    from mega_agentrl.reshard.transport import WeightLink
    from tests.reshard.wire.ranks import Seat


class DeviceLanding:
    """Parameters of a layout in the memory of the current GPU."""

    def __init__(self, layout: list[ShardLayout], dtype: torch.dtype, regions: Regions) -> None:
        self.layout, self.regions = layout, regions
        self.params = {s.name: torch.zeros(s.shape, dtype=dtype, device="cuda") for s in layout}

    def write(self, place: Place, values: torch.Tensor) -> None:
        assert values.is_cuda, "a frame is read where it is"
        self.regions.copy(place, self.params[place.param][place.rect.slices], values)


def take_device(seat: Seat, number: int) -> Any:
    """Where this rank is from now on."""
    torch.cuda.set_device(number)
    return here()


def join_link(seat: Seat, link: WeightLink, layout: list[ShardLayout], rank: int) -> None:
    seat.kept = [join(link, rank, layout), link.plan, layout]


def send(seat: Seat, folder: Path, version: int, regions: list[Region], dtype: str) -> Any:
    """Send the weights of a folder; what this rank says of the regions."""
    courier, plan, layout = seat.kept
    shards = {
        name: value.to("cuda", getattr(torch, dtype))
        for name, value in cut(layout, load_file(folder / "model.safetensors")).items()
    }
    witness = Witness(layout, regions, plan.dtype_of)
    courier.send(shards, version, witness.watch())
    return witness.testify(shards.__getitem__)


def receive(seat: Seat, version: int, dtype: str) -> None:
    """Take one version; `kept[3]` is then the landing."""
    courier, plan, layout = seat.kept[:3]
    landing = DeviceLanding(layout, getattr(torch, dtype), Regions(layout, plan.dtype_of))
    courier.receive(landing, version)
    landing.regions.take((shard, landing.params[shard.name]) for shard in layout)
    seat.kept[3:] = [landing]


def mismatches(seat: Seat, expected: Any) -> list[Region]:
    """Regions that are not what the trainer says. expected: as in `Regions.mismatches`."""
    return seat.kept[3].regions.mismatches(expected)


def spoil(seat: Seat, name: str) -> None:
    """One bit of one element is another; the digests are taken anew."""
    landing = seat.kept[3]
    landing.params[name].view(torch.uint8).view(-1)[5:6].bitwise_xor_(1)
    landing.regions.clear()
    landing.regions.take((shard, landing.params[shard.name]) for shard in landing.layout)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Its values as integers of their size."""
    kind = torch.int16 if tensor.element_size() == 2 else torch.int32
    return tensor.contiguous().cpu().view(kind).numpy()


def bits(seat: Seat) -> dict[str, np.ndarray]:
    """All parameters."""
    return {name: bits_of(value) for name, value in seat.kept[3].params.items()}


def leave(seat: Seat) -> None:
    seat.kept[0].close()
    seat.kept = []
