"""Proof that rollout ranks hold the weights of the trainer ranks, by digests.

A region is a rectangle of a Hugging Face tensor that a rollout rank holds in one block. A part is
the intersection of a region and a block of a trainer rank. For every region,

    rollout ranks   compute the digest of the values received   `ReceivedDigests.compute`
    trainer ranks   compute the digests of the region's parts   `SourceDigests.compute`
    driver          sums over the parts, using one holder of    `DigestVerifier.expected_digests`
                    each part, and compares replicas
    rollout ranks   compare; serving resumes only if equal      `ReceivedDigests.find_mismatches`

Regions and parts follow from the layouts of both sides alone, not from the plan, so a wrong plan
is detected as well as wrong bytes.

Both sides compute digests while they copy values (`DigestAccumulator`). Blocks whose copies do not
give a digest are read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import distinct_layouts
from mega_agentrl.reshard.planner.transfer_plan import ParamSliceIndex, TensorSlice
from mega_agentrl.reshard.verify.digest import compute_digests
from mega_agentrl.reshard.verify.digest_accumulator import DigestAccumulator, ParamBlock

if TYPE_CHECKING:
    from mega_agentrl.reshard.frames import CopyFn, PartBatch
    from mega_agentrl.reshard.layout import Block, Rect, ShardLayout


RankLayout = Sequence["ShardLayout"]


class DigestRegion(NamedTuple):
    """A rectangle of a Hugging Face tensor that a rollout rank holds in one block."""

    hf_name: str
    rect: Rect


class RegionPart(NamedTuple):
    """The rectangle that a trainer rank's block and a region have in common."""

    region_index: int
    """Index of the region."""
    rect: Rect


def regions_of_layout(layout: RankLayout) -> list[DigestRegion]:
    """Return the distinct rectangles that a rank holds, block by block, in canonical order."""
    regions = {DigestRegion(block.hf_name, block.hf_rect) for s in layout for block in s.blocks}
    return sorted(regions, key=_region_order)


def _region_order(region: DigestRegion) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return a key that sorts like the regions themselves, but faster."""
    return region.hf_name, region.rect.start, region.rect.stop


def collect_regions(layouts: Sequence[RankLayout]) -> list[DigestRegion]:
    """Return the distinct regions of all ranks; ranks with equal shards may share one object."""
    distinct = distinct_layouts(layouts)
    regions = {region for layout in distinct for region in regions_of_layout(layout)}
    return sorted(regions, key=_region_order)


class RegionIndex:
    """Finds regions by tensor."""

    def __init__(self, regions: Sequence[DigestRegion]) -> None:
        self._by_name: dict[str, list[tuple[int, DigestRegion]]] = defaultdict(list)
        for number, region in enumerate(regions):
            self._by_name[region.hf_name].append((number, region))

    def regions_of(self, layout: RankLayout) -> list[DigestRegion]:
        """Return all regions of the tensors of which a trainer rank holds a part, in order."""
        names = {block.hf_name for shard in layout for block in shard.blocks}
        entries = [entry for name in names for entry in self._by_name.get(name, ())]
        return [region for _, region in sorted(entries, key=lambda entry: entry[0])]

    def parts_of(self, layout: RankLayout) -> list[RegionPart]:
        """Return the distinct parts of the regions that a trainer rank holds, ascending."""
        parts = set()
        for shard in layout:
            for block in shard.blocks:
                for number, region in self._by_name.get(block.hf_name, ()):
                    rect = block.hf_rect.intersect(region.rect)
                    if rect is not None:
                        parts.add(RegionPart(number, rect))
        return sorted(parts, key=lambda part: (part[0], part.rect.start, part.rect.stop))


class ReceivedDigests:
    """Digests of the values that a rollout rank has received."""

    def __init__(self, layout: RankLayout, dtype_of: Mapping[str, str]) -> None:
        self.regions = regions_of_layout(layout)
        self._dtype_of = dtype_of
        blocks = [(shard.name, block) for shard in layout for block in shard.blocks]
        self._accumulator = DigestAccumulator(
            [ParamBlock(name, b.local_rect, b.hf_rect) for name, b in blocks], to_frame=False
        )
        index_of = {region: number for number, region in enumerate(self.regions)}
        self._region_of_block = np.array(
            [index_of[DigestRegion(b.hf_name, b.hf_rect)] for _, b in blocks], dtype=np.int64
        )
        self._digests = np.zeros((len(blocks), 2), dtype=np.uint32)
        """Digests of the blocks that were computed from memory."""
        self._is_computed = np.zeros(len(blocks), dtype=bool)
        self._is_copied = np.zeros(len(blocks), dtype=bool)
        """Blocks whose digests the accumulator has."""
        self._blocks_by_param: dict[str, list[tuple[int, Block]]] = defaultdict(list)
        for number, (name, block) in enumerate(blocks):
            self._blocks_by_param[name].append((number, block))

    def reset(self) -> None:
        """Discard all digests."""
        self._is_computed[:] = self._is_copied[:] = False
        self._accumulator.reset()

    def copy(
        self, batch: PartBatch, frame: torch.Tensor, params: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy a batch from a frame to parameters, and add the digests of the copied values."""
        self._accumulator.copy(batch, frame, params)

    def compute(
        self, shards: Iterable[tuple[ShardLayout, torch.Tensor]], *, were_copied: bool = True
    ) -> None:
        """Complete the digests of all blocks of some parameters.

        Args:
            shards: The parameters with their values, which are read where copies did not cover a
                block.
            were_copied: Whether `copy` made the values; if not, all of them are read.
        """
        missing, items = [], []
        for shard, values in shards:
            for index, block in self._blocks_by_param[shard.name]:
                self._is_copied[index] = were_copied and self._accumulator.is_covered(index)
                if not self._is_copied[index]:
                    missing.append(index)
                    items.append(self._read_block(block, values))
        self._digests[missing] = compute_digests(items)
        self._is_computed[missing] = True

    def _read_block(self, block: Block, values: torch.Tensor) -> tuple[torch.Tensor, Rect]:
        block_values = values.detach()[block.local_rect.slices].reshape(block.hf_rect.shape)
        return block_values.to(getattr(torch, self._dtype_of[block.hf_name])), block.hf_rect

    def find_mismatches(self, expected: np.ndarray) -> list[DigestRegion]:
        """Return the regions of all blocks whose digests are missing or differ from `expected`.

        Args:
            expected: `[regions, 2]` uint32 in the order of `regions`.
        """
        copied = self._is_copied[:, None]
        digests = np.where(copied, self._accumulator.digests(), self._digests)
        is_wrong = (digests != expected[self._region_of_block]).any(axis=1)
        is_wrong |= ~(self._is_computed | self._is_copied)
        return [self.regions[number] for number in np.unique(self._region_of_block[is_wrong])]


class SourceDigests:
    """Digests of the region parts that a trainer rank holds."""

    def __init__(
        self, layout: RankLayout, regions: Sequence[DigestRegion], dtype_of: Mapping[str, str]
    ) -> None:
        self.parts = RegionIndex(regions).parts_of(layout)
        slice_index = ParamSliceIndex(layout)
        self._blocks: list[ParamBlock] = []
        self._dtypes: list[torch.dtype] = []
        for part in self.parts:
            name = regions[part.region_index].hf_name
            param, local_rect = slice_index.find(TensorSlice(name, part.rect, num_bytes=0))[0]
            self._blocks.append(ParamBlock(param, local_rect, part.rect))
            self._dtypes.append(getattr(torch, dtype_of[name]))
        self._accumulator = DigestAccumulator(self._blocks, to_frame=True)

    def make_copy_fn(self) -> CopyFn:
        """Return a function that digests the rank's shards while it copies from them."""
        self._accumulator.reset()
        return self._accumulator.copy

    def compute(self, parameter: Callable[[str], torch.Tensor]) -> np.ndarray:
        """Return `[parts, 2]` uint32 digests, reading parts that were not copied exactly once.

        Args:
            parameter: Returns a parameter of the rank by name, with the values that were sent.
        """
        digests = self._accumulator.digests()
        blocks = range(len(self._blocks))
        missing = [index for index in blocks if not self._accumulator.is_covered(index)]
        self._accumulator.reset()
        digests[missing] = compute_digests(self._read_block(index, parameter) for index in missing)
        return digests

    def _read_block(
        self, index: int, parameter: Callable[[str], torch.Tensor]
    ) -> tuple[torch.Tensor, Rect]:
        block = self._blocks[index]
        values = parameter(block.param).detach()[block.local_rect.slices]
        return values.reshape(block.hf_rect.shape).to(self._dtypes[index]), block.hf_rect


class DigestVerifier:
    """Computes the expected digests of all regions, on the driver, once per update.

    Its tables are built once per session, because a large model has millions of parts.

    Args:
        layouts: Layouts of all trainer ranks.
        regions: Regions of all rollout ranks.

    Raises:
        ValueError: If trainer ranks, replicas aside, do not hold every element of a region once.
    """

    def __init__(self, layouts: Sequence[RankLayout], regions: Sequence[DigestRegion]) -> None:
        self._regions = regions
        self._index_of = {region: number for number, region in enumerate(regions)}
        region_index = RegionIndex(regions)
        number_of: dict[RegionPart, int] = {}
        numbers_of_layout: dict[int, np.ndarray] = {}
        for layout in distinct_layouts(layouts):
            numbers_of_layout[id(layout)] = np.array(
                [number_of.setdefault(p, len(number_of)) for p in region_index.parts_of(layout)],
                dtype=np.int64,
            )
        self._parts = list(number_of)
        numbers = [numbers_of_layout[id(layout)] for layout in layouts]
        self._rank_ends = np.cumsum([len(rank_numbers) for rank_numbers in numbers])
        self._part_of_digest = np.concatenate([np.zeros(0, dtype=np.int64), *numbers])
        """Index of the part of every digest, concatenated over the ranks."""
        _, self._first_replica = np.unique(self._part_of_digest, return_index=True)
        self._region_of_part = np.array([part.region_index for part in self._parts], dtype=np.int64)
        self._check_coverage()

    def _check_coverage(self) -> None:
        num_held = np.zeros(len(self._regions), dtype=np.int64)
        sizes = np.array([part.rect.numel for part in self._parts], dtype=np.int64)
        np.add.at(num_held, self._region_of_part, sizes)
        for region, count in zip(self._regions, num_held.tolist(), strict=True):
            if count != region.rect.numel:
                raise InputError(
                    f"verification of {region.hf_name} {region.rect}: elements of trainer ranks",
                    count,
                    str(region.rect.numel),
                    "ranks that are sharded differently, or layouts of two different models",
                )

    def expected_digests(self, rank_digests: Sequence[np.ndarray]) -> np.ndarray:
        """Return `[regions, 2]` uint32 digests from the digests of all trainer ranks, in order.

        Raises:
            ValueError: If two ranks hold different values of the same part.
        """
        digests = np.concatenate(rank_digests)
        assert len(digests) == len(self._part_of_digest), "one digest per part of every rank"
        part_digests = digests[self._first_replica]
        is_different = (digests != part_digests[self._part_of_digest]).any(axis=1)
        if is_different.any():
            self._raise_different_replicas(int(np.flatnonzero(is_different)[0]))
        sums = np.zeros((len(self._regions), 2), dtype=np.uint32)
        np.add.at(sums, self._region_of_part, part_digests)
        return sums

    def _raise_different_replicas(self, position: int) -> None:
        number = self._part_of_digest[position]
        part, first = self._parts[number], self._first_replica[number]
        first_rank, rank = np.searchsorted(self._rank_ends, [first, position], side="right")
        raise InputError(
            f"verification of {self._regions[part.region_index].hf_name} {part.rect}: "
            "trainer ranks with different values",
            (int(first_rank), int(rank)),
            "equal ones",
            "replicas that have drifted apart in training",
        )

    def region_indices(self, regions: Sequence[DigestRegion]) -> np.ndarray:
        """Return `[regions]` int64, the rows of the regions in the result of `expected_digests`."""
        return np.array([self._index_of[region] for region in regions], dtype=np.int64)
