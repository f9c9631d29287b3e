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

On a CPU both sides compute digests while they copy values (`DigestAccumulator`). While a slice that
lies inside one block is copied, its digest is added to the block's. The sum is valid if the slices
covered the block exactly, without overlap. Any other block (written twice, or by a copy that
converts the dtype) is read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mega_agentrl.reshard.layout import distinct_layouts
from mega_agentrl.reshard.planner.transfer_plan import ParamSliceIndex, TensorSlice, map_rect
from mega_agentrl.reshard.verify.digest import CopyWithDigest, compile_kernel, compute_digests

if TYPE_CHECKING:
    from mega_agentrl.reshard.frames import CopyFn
    from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import ParamSlice


class ParamBlock(NamedTuple):
    """A rectangle of a parameter and the rectangle of the tensor it holds."""

    param: str
    """Name of the parameter."""
    local_rect: Rect
    """Rectangle in the parameter."""
    hf_rect: Rect
    """Rectangle in the Hugging Face tensor."""


class DigestAccumulator:
    """Digests of the blocks of one rank, which are referred to by index."""

    def __init__(self, blocks: Sequence[ParamBlock]) -> None:
        self._blocks = blocks
        self._blocks_by_param: dict[str, list[int]] = {}
        for index, block in enumerate(blocks):
            self._blocks_by_param.setdefault(block.param, []).append(index)
        self._copiers: dict[ParamSlice, tuple[list[int], CopyWithDigest | None]] = {}
        """By slice, the blocks it overlaps and, if it lies inside one, how to digest it."""
        self._sums = np.zeros((len(blocks), 2), dtype=np.uint32)
        self._sums_address = self._sums.ctypes.data
        self._last_cover: list[list[Rect] | None] = [None] * len(blocks)
        """Rectangles that covered the block the last time; they rarely change."""
        self.reset()
        if not torch.cuda.is_available():
            compile_kernel()  # when a rank joins, not during its first update

    def reset(self) -> None:
        """Discard all sums."""
        self._sums[:] = 0
        self._copied_rects: list[list[Rect] | None] = [[] for _ in self._blocks]
        """Local rectangles included in the sum, or None if the block has no valid sum."""

    def copy(self, param_slice: ParamSlice, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to `to`, of the same number of elements, and add their digest.

        `param_slice` is the rectangle of the parameter that is written or read.
        """
        entry = self._copiers.get(param_slice)
        if entry is None:
            entry = self._copiers[param_slice] = self._make_copier(param_slice)
        indices, copier = entry
        if copier is not None:
            rects = self._copied_rects[indices[0]]
            sums_at = self._sums_address + 8 * indices[0]
            if rects is not None and copier.copy(to, values, sums_at):
                rects.append(param_slice.rect)
                return
        to.copy_(values.view(to.shape))
        for index in indices:
            self._copied_rects[index] = None

    def digest_of_block(self, index: int) -> np.ndarray | None:
        """Return `[2]` uint32, or None if the digest must be computed from memory."""
        rects = self._copied_rects[index]
        if rects is None or not (rects == self._last_cover[index] or self._covers(index, rects)):
            return None
        self._last_cover[index] = rects
        digest: np.ndarray = self._sums[index]
        return digest

    def _covers(self, index: int, rects: list[Rect]) -> bool:
        """Return whether the rectangles, which lie inside the block, cover it without overlap."""
        covered = sum(rect.numel for rect in rects)
        return covered == self._blocks[index].local_rect.numel and all(
            one.intersect(other) is None for one, other in combinations(rects, 2)
        )

    def _make_copier(self, param_slice: ParamSlice) -> tuple[list[int], CopyWithDigest | None]:
        common = {
            n: self._blocks[n].local_rect.intersect(param_slice.rect)
            for n in self._blocks_by_param.get(param_slice.param, [])
        }
        indices = [index for index, rect in common.items() if rect is not None]
        if len(indices) != 1 or common[indices[0]] != param_slice.rect:
            return indices, None
        block = self._blocks[indices[0]]
        return indices, CopyWithDigest(map_rect(param_slice.rect, block.local_rect, block.hf_rect))


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

    def of_held_tensors(self, layout: RankLayout) -> list[DigestRegion]:
        """Return the regions of those tensors of which a trainer rank holds a part, in order."""
        names = {block.hf_name for shard in layout for block in shard.blocks}
        found = [entry for name in names for entry in self._by_name.get(name, ())]
        return [region for _, region in sorted(found, key=lambda entry: entry[0])]

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
        self._index_of = {region: number for number, region in enumerate(self.regions)}
        self._dtype_of = dtype_of
        self._digests = np.zeros((len(self.regions), 2), dtype=np.uint32)
        self._is_computed = np.zeros(len(self.regions), dtype=bool)
        blocks = [(shard.name, block) for shard in layout for block in shard.blocks]
        self._accumulator = DigestAccumulator(
            [ParamBlock(name, b.local_rect, b.hf_rect) for name, b in blocks]
        )
        self._blocks_by_param: dict[str, list[tuple[int, Block]]] = defaultdict(list)
        for number, (name, block) in enumerate(blocks):
            self._blocks_by_param[name].append((number, block))

    def reset(self) -> None:
        """Discard all digests."""
        self._is_computed[:] = False
        self._accumulator.reset()

    def copy(self, param_slice: ParamSlice, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy received values to `to`, the slice of the parameter, and digest them."""
        self._accumulator.copy(param_slice, to, values)

    def compute(self, shards: Iterable[tuple[ShardLayout, torch.Tensor]]) -> None:
        """Compute the digests of all blocks of some parameters.

        Args:
            shards: The parameters with their values, which are read where copies did not cover a
                block.

        Raises:
            ValueError: If a region is held in two places with different values.
        """
        regions, items = [], []
        for shard, values in shards:
            for index, block in self._blocks_by_param[shard.name]:
                region = DigestRegion(block.hf_name, block.hf_rect)
                if (copied := self._accumulator.digest_of_block(index)) is not None:
                    self._store_digest(region, copied)
                    continue
                held = values.detach()[block.local_rect.slices].reshape(block.hf_rect.shape)
                dtype = getattr(torch, self._dtype_of[block.hf_name])
                regions.append(region)
                items.append((held.to(dtype), block.hf_rect))
        for region, digest in zip(regions, compute_digests(items), strict=True):
            self._store_digest(region, digest)

    def _store_digest(self, region: DigestRegion, digest: np.ndarray) -> None:
        number = self._index_of[region]
        if self._is_computed[number] and (self._digests[number] != digest).any():
            raise ValueError(
                f"{region.hf_name} {region.rect} is held twice by this rank, with different values"
            )
        self._digests[number] = digest
        self._is_computed[number] = True

    def find_mismatches(self, expected: np.ndarray) -> list[DigestRegion]:
        """Return the regions with another digest than expected, or without one.

        Args:
            expected: `[regions, 2]` uint32 in the order of `regions`.
        """
        wrong = ~self._is_computed | (self._digests != expected).any(axis=1)
        return [self.regions[number] for number in np.flatnonzero(wrong)]


class SourceDigests:
    """Digests of the parts of the given regions that a trainer rank holds, by its own layout."""

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
        self._accumulator = DigestAccumulator(self._blocks)

    def make_copy_fn(self) -> CopyFn:
        """Return a function that digests the rank's shards while it copies from them."""
        self._accumulator.reset()
        return self._accumulator.copy

    def compute(self, parameter: Callable[[str], torch.Tensor]) -> np.ndarray:
        """Return `[parts, 2]` uint32 digests, reading parts that were not copied exactly once.

        Args:
            parameter: Returns the rank's parameter of a name, with the values that were sent.
        """
        digests = np.zeros((len(self._blocks), 2), dtype=np.uint32)
        missing = []
        for index in range(len(self._blocks)):
            copied = self._accumulator.digest_of_block(index)
            if copied is None:
                missing.append(index)
            else:
                digests[index] = copied
        self._accumulator.reset()
        digests[missing] = compute_digests(self._read_block(index, parameter) for index in missing)
        return digests

    def _read_block(
        self, index: int, parameter: Callable[[str], torch.Tensor]
    ) -> tuple[torch.Tensor, Rect]:
        block = self._blocks[index]
        held = parameter(block.param).detach()[block.local_rect.slices]
        return held.reshape(block.hf_rect.shape).to(self._dtypes[index]), block.hf_rect


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
        self._rank_ends = np.cumsum([len(part) for part in numbers])
        self._part_of_digest = np.concatenate([np.zeros(0, dtype=np.int64), *numbers])
        """Index of the part of every digest, concatenated over the ranks."""
        _, self._first_replica = np.unique(self._part_of_digest, return_index=True)
        self._region_of_part = np.array([part.region_index for part in self._parts], dtype=np.int64)
        self._check_coverage()

    def _check_coverage(self) -> None:
        held = np.zeros(len(self._regions), dtype=np.int64)
        sizes = np.array([part.rect.numel for part in self._parts], dtype=np.int64)
        np.add.at(held, self._region_of_part, sizes)
        for region, count in zip(self._regions, held.tolist(), strict=True):
            if count != region.rect.numel:
                raise ValueError(
                    f"verification of {region.hf_name} {region.rect}: trainer ranks hold {count} "
                    f"elements of it, expected {region.rect.numel}; probable cause: ranks that "
                    "are sharded differently, or layouts of two different models"
                )

    def expected_digests(self, rank_digests: Sequence[np.ndarray]) -> np.ndarray:
        """Return `[regions, 2]` uint32 digests from those of all trainer ranks, in order.

        Raises:
            ValueError: If two ranks hold different values of the same part.
        """
        digests = np.concatenate(rank_digests)
        assert len(digests) == len(self._part_of_digest), (
            "digests are of the ranks and regions given"
        )
        of_parts = digests[self._first_replica]
        differ = (digests != of_parts[self._part_of_digest]).any(axis=1)
        if differ.any():
            self._raise_differing(int(np.flatnonzero(differ)[0]))
        sums = np.zeros((len(self._regions), 2), dtype=np.uint32)
        np.add.at(sums, self._region_of_part, of_parts)
        return sums

    def _raise_differing(self, position: int) -> None:
        number = self._part_of_digest[position]
        part, first = self._parts[number], self._first_replica[number]
        first_rank, rank = np.searchsorted(self._rank_ends, [first, position], side="right")
        raise ValueError(
            f"verification of {self._regions[part.region_index].hf_name} {part.rect}: "
            f"trainer ranks {first_rank} and {rank} hold different values, expected "
            "equal ones; probable cause: replicas that have drifted apart in training"
        )

    def region_indices(self, regions: Sequence[DigestRegion]) -> np.ndarray:
        """Return `[regions]` int64, the rows of the regions in the result of `expected_digests`."""
        return np.array([self._index_of[region] for region in regions], dtype=np.int64)
