"""Proof that rollout ranks hold what trainer ranks hold: digests that know nothing of the plan.

A region is a rectangle of a Hugging Face tensor that a rollout rank holds in one block. For
every region

    rollout rank    sums over the values it has received                    `Regions.digests`
    trainer ranks   sum over the cells of the region that they hold         `Witness.testify`
    driver          adds up one holder of each cell, and compares replicas  `Court.expected`
    rollout rank    compares, and serves only then                          `Regions.check`

From the layouts of both sides alone: which bucket carried what, over which hops, does not enter,
so a plan that is wrong is found as well as bytes that are. A cell is what a region and a block
of a trainer rank have in common.

Where the values are copied by a CPU both sides sum while they copy (`tally`), and read again
only what the copies did not cover exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mega_agentrl.reshard.delivery import Piece, Places
from mega_agentrl.reshard.digest import digests
from mega_agentrl.reshard.tally import Span, Tally

if TYPE_CHECKING:
    from mega_agentrl.reshard.delivery import Place
    from mega_agentrl.reshard.frames import Copy
    from mega_agentrl.reshard.layout import Block, Rect, ShardLayout

Layout = Sequence["ShardLayout"]
Shards = Mapping[str, torch.Tensor]


class Region(NamedTuple):
    """`rect` of tensor `hf_name`."""

    hf_name: str
    rect: Rect


class Cell(NamedTuple):
    """The part `rect` of the region with this number."""

    region: int
    rect: Rect


def regions_of(layout: Layout) -> list[Region]:
    """What a rank holds, block by block, each rectangle once, in an order all agree on."""
    return sorted({Region(block.hf_name, block.hf_rect) for s in layout for block in s.blocks})


def all_regions(layouts: Iterable[Layout]) -> list[Region]:
    """Regions of all ranks, each once."""
    return sorted({region for layout in layouts for region in regions_of(layout)})


def regions_near(layout: Layout, regions: Sequence[Region]) -> list[Region]:
    """Those of the tensors that a trainer rank holds something of, in order."""
    names = {block.hf_name for shard in layout for block in shard.blocks}
    return [region for region in regions if region.hf_name in names]


class Regions:
    """The rollout rank's side. dtype_of: wire type by tensor name."""

    def __init__(self, layout: Layout, dtype_of: Mapping[str, str]) -> None:
        self.regions = regions_of(layout)
        self._number = {region: number for number, region in enumerate(self.regions)}
        self._dtype_of = dtype_of
        self._found = np.zeros((len(self.regions), 2), dtype=np.uint32)
        self._seen = np.zeros(len(self.regions), dtype=bool)
        blocks = [(shard.name, block) for shard in layout for block in shard.blocks]
        self._tally = Tally([Span(name, b.local_rect, b.hf_rect) for name, b in blocks])
        self._spans: dict[str, list[tuple[int, Block]]] = defaultdict(list)
        for number, (name, block) in enumerate(blocks):
            self._spans[name].append((number, block))

    def clear(self) -> None:
        """Forget all digests."""
        self._seen[:] = False
        self._tally.clear()

    def copy(self, place: Place, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy what has arrived to its place; `to` is the place in the parameter."""
        self._tally.copy(place, to, values)

    def take(self, shards: Iterable[tuple[ShardLayout, torch.Tensor]]) -> None:
        """Work out the digests of all blocks of some parameters: from what was copied to them
        or, where that is not the whole story, from the values they hold.

        Raises `ValueError` where a region has two places that differ.
        """
        regions, items = [], []
        for shard, values in shards:
            for span, block in self._spans[shard.name]:
                region = Region(block.hf_name, block.hf_rect)
                if (copied := self._tally.digest_of(span)) is not None:
                    self._note(region, copied)
                    continue
                held = values.detach()[block.local_rect.slices].reshape(block.hf_rect.shape)
                dtype = getattr(torch, self._dtype_of[block.hf_name])
                regions.append(region)
                items.append((held.to(dtype), block.hf_rect))
        for region, found in zip(regions, digests(items), strict=True):
            self._note(region, found)

    def _note(self, region: Region, found: np.ndarray) -> None:
        number = self._number[region]
        if self._seen[number] and (self._found[number] != found).any():
            raise ValueError(
                f"{region.hf_name} {region.rect} is held twice by this rank, and differently"
            )
        self._found[number], self._seen[number] = found, True

    def mismatches(self, expected: np.ndarray) -> list[Region]:
        """Regions that are not as expected, or of which no digest was taken.

        expected: [regions, 2] uint32 in the order of `regions`.
        """
        wrong = ~self._seen | (self._found != expected).any(axis=1)
        return [self.regions[number] for number in np.flatnonzero(wrong)]


class Witness:
    """A trainer rank's side: the cells of given regions that it holds, by its own layout."""

    def __init__(
        self, layout: Layout, regions: Sequence[Region], dtype_of: Mapping[str, str]
    ) -> None:
        self.cells = cells_of(layout, regions)
        self._dtype_of = dtype_of
        places = Places(layout)
        self._places = [
            (places.find(Piece(regions[cell.region].hf_name, cell.rect, 0))[0], cell.rect, name)
            for cell in self.cells
            for name in [regions[cell.region].hf_name]
        ]
        self._tally = Tally(
            [Span(place.param, place.rect, rect) for place, rect, _ in self._places]
        )

    def watch(self) -> Copy:
        """How to copy from the rank's shards, so that they need not be read again."""
        self._tally.clear()
        return self._tally.copy

    def testify(self, parameter: Callable[[str], torch.Tensor]) -> np.ndarray:
        """[cells, 2] uint32. parameter: the rank's shard of a name, as it was sent.

        Ends what `watch` has begun.
        """
        said = np.zeros((len(self._places), 2), dtype=np.uint32)
        missing = []
        for number in range(len(self._places)):
            copied = self._tally.digest_of(number)
            if copied is None:
                missing.append(number)
            else:
                said[number] = copied
        self._tally.clear()
        said[missing] = digests(
            (
                parameter(place.param)
                .detach()[place.rect.slices]
                .reshape(rect.shape)
                .to(getattr(torch, self._dtype_of[name])),
                rect,
            )
            for place, rect, name in (self._places[number] for number in missing)
        )
        return said


def cells_of(layout: Layout, regions: Sequence[Region]) -> list[Cell]:
    """Cells of the regions that a trainer rank holds, ascending, each once."""
    blocks: dict[str, list[Rect]] = defaultdict(list)
    for shard in layout:
        for block in shard.blocks:
            blocks[block.hf_name].append(block.hf_rect)
    common = (
        (number, rect.intersect(region.rect))
        for number, region in enumerate(regions)
        for rect in blocks.get(region.hf_name, ())
    )
    return sorted({Cell(number, rect) for number, rect in common if rect is not None})


class Court:
    """The driver's side. layouts: of all trainer ranks.

    All tables are made here, once per link: a large model has millions of cells. Raises
    `ValueError` for a region of which the trainer ranks do not hold every element once,
    replicas aside.
    """

    def __init__(self, layouts: Sequence[Layout], regions: Sequence[Region]) -> None:
        self._regions = regions
        self._number = {region: number for number, region in enumerate(regions)}
        first: dict[Cell, int] = {}
        replicas: list[tuple[int, int]] = []
        self._said: list[tuple[int, Cell]] = []
        """Rank and cell of every digest there will be, all testimonies in a row."""
        for rank, layout in enumerate(layouts):
            for cell in cells_of(layout, regions):
                at = len(self._said)
                self._said.append((rank, cell))
                if first.setdefault(cell, at) != at:
                    replicas.append((at, first[cell]))
        self._first = np.array(list(first.values()), dtype=np.int64)
        self._region_of_first = np.array([cell.region for cell in first], dtype=np.int64)
        self._replicas = np.array(replicas, dtype=np.int64).reshape(-1, 2)
        self._check_held(first)

    def _check_held(self, cells: Iterable[Cell]) -> None:
        held = [0] * len(self._regions)
        for cell in cells:
            held[cell.region] += cell.rect.numel
        for region, count in zip(self._regions, held, strict=True):
            if count != region.rect.numel:
                raise ValueError(
                    f"proof of {region.hf_name} {region.rect}: trainer ranks hold {count} elements "
                    f"of it, expected {region.rect.numel}; probable cause: ranks that are cut "
                    "differently, or layouts of two different models"
                )

    def expected(self, testimonies: Sequence[np.ndarray]) -> np.ndarray:
        """[regions, 2] uint32 digests. testimonies: of all trainer ranks, in order.

        Raises `ValueError` where two ranks hold different values of the same cell.
        """
        said = np.concatenate(testimonies)
        assert len(said) == len(self._said), "testimonies are of the ranks and regions given"
        differ = (said[self._replicas[:, 0]] != said[self._replicas[:, 1]]).any(axis=1)
        if differ.any():
            other, first = self._replicas[np.flatnonzero(differ)[0]]
            (other_rank, cell), (first_rank, _) = self._said[other], self._said[first]
            raise ValueError(
                f"proof of {self._regions[cell.region].hf_name} {cell.rect}: trainer ranks "
                f"{first_rank} and {other_rank} should hold the same values and do not; probable "
                "cause: replicas that have drifted apart in training"
            )
        sums = np.zeros((len(self._regions), 2), dtype=np.uint32)
        np.add.at(sums, self._region_of_first, said[self._first])
        return sums

    def numbers_of(self, regions: Sequence[Region]) -> np.ndarray:
        """[regions] int64: where some regions stand in what `expected` returns."""
        return np.array([self._number[region] for region in regions], dtype=np.int64)
