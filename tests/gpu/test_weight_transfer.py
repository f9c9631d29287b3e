"""Weight transfer between GPUs: the received bits equal the sent ones, and so do the digests.

On one GPU, CUDA IPC maps the frames in the sender's memory. With two GPUs the transfer uses NCCL,
or both at once if ranks of both sides share GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.device_location import rank_locations
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    collect_regions,
    regions_of_layout,
)
from tests.gpu import transfer_jobs
from tests.gpu.gpus import needs_gpus
from tests.reshard.fake_trainer import source_layouts
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import engine_layouts
from tests.reshard.transports.ranks import ranks
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu
BUCKET_BYTES = 20_000
PLACES = [
    pytest.param([0], [0], "", marks=needs_gpus(1), id="ipc"),
    pytest.param(
        [0], [0], "expandable_segments:True", marks=needs_gpus(1), id="ipc-expandable-segments"
    ),
    pytest.param([0, 0], [0, 0], "", marks=needs_gpus(1), id="ipc-two-on-each-side"),
    pytest.param([0], [1], "", marks=needs_gpus(2), id="nccl"),
    pytest.param([0, 1], [0, 1], "", marks=needs_gpus(2), id="both"),
    pytest.param([0, 1], [2, 3], "", marks=needs_gpus(4), id="nccl-four"),
]


@dataclass
class Sides:
    """Trainer and rollout ranks of a transfer; `devices` lists those of the trainers first."""

    group: object
    devices: list[int]
    sources: list
    rollout_ranks: list
    names: list
    dtype: str
    allocator: str
    """Settings of torch's allocator; empty for its defaults."""

    def connect(self) -> None:
        everyone = range(len(self.devices))
        locations = rank_locations(
            [
                self.group.ask(r, transfer_jobs.take_device, self.devices[r], self.allocator)
                for r in everyone
            ]
        )
        self.regions = collect_regions(self.rollout_ranks)
        self.verifier = DigestVerifier(self.sources, self.regions)
        layouts = (self.sources, self.rollout_ranks)
        session = transfer_jobs.make_session(
            self.group, layouts, locations, self.dtype, self.names, BUCKET_BYTES
        )
        for rank, layout in enumerate([*self.sources, *self.rollout_ranks]):
            self.group.start(rank, transfer_jobs.join, session, layout, rank)
        for rank in everyone:
            self.group.finish(rank)

    @property
    def rollout(self) -> range:
        return range(len(self.sources), len(self.devices))

    def update(self, folder, version) -> list:
        """Transfer a version; return the expected digests of each rollout rank."""
        trainers = range(len(self.sources))
        for rank in trainers:
            order = (folder, version, self.regions, self.dtype)
            self.group.start(rank, transfer_jobs.send, *order)
        for rank in self.rollout:
            self.group.start(rank, transfer_jobs.receive, version, self.dtype)
        rank_digests = [self.group.finish(rank) for rank in trainers]
        for rank in self.rollout:
            self.group.finish(rank)
        digests = self.verifier.expected_digests(rank_digests)
        return [
            digests[self.verifier.region_indices(regions_of_layout(layout))]
            for layout in self.rollout_ranks
        ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model("qwen3", root / str(seed), seed=seed) for seed in range(2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("trainers", "engines", "allocator"), PLACES)
def test_the_bits_received_are_those_sent(folders, trainers, engines, allocator, dtype):
    shape = ModelShape.from_folder(folders[0])
    layouts = engine_layouts(shape, len(engines))
    with ranks(len(trainers) + len(engines)) as group:
        sides = Sides(
            group=group,
            devices=[*trainers, *engines],
            sources=source_layouts(folders[0], len(trainers), 1),
            rollout_ranks=layouts,
            names=list(hf_shapes(shape)),
            dtype=dtype,
            allocator=allocator,
        )
        sides.connect()
        for version in range(1, 5):
            folder = folders[version % 2]
            tensors = load_file(folder / "model.safetensors")
            expected_digests = sides.update(folder, version)
            for rank, layout, digests in zip(sides.rollout, layouts, expected_digests, strict=True):
                assert group.ask(rank, transfer_jobs.mismatches, digests) == []
                got = group.ask(rank, transfer_jobs.bits)
                for name, expected in cut(layout, tensors).items():
                    sent = transfer_jobs.bits_of(expected.to(getattr(torch, dtype)))
                    assert np.array_equal(got[name], sent), name
        check_a_wrong_bit_is_detected(sides, digests)
        for rank in range(len(sides.devices)):
            group.ask(rank, transfer_jobs.leave)


def check_a_wrong_bit_is_detected(sides, digests):
    last = sides.rollout[-1]
    shard = sides.rollout_ranks[-1][1]
    sides.group.ask(last, transfer_jobs.spoil, shard.name)
    (wrong,) = sides.group.ask(last, transfer_jobs.mismatches, digests)
    assert wrong.hf_name in {block.hf_name for block in shard.blocks}


@needs_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [(0, 64), (3, 40), (7, 8)])
def test_a_digest_is_the_same_on_both_devices(columns, dtype):
    from mega_agentrl.reshard.layout import Rect
    from mega_agentrl.reshard.verify.digest import compute_digests

    whole = torch.randn(50, 64).to(dtype)
    rect = Rect((11, columns[0]), (37, columns[1]))
    found = compute_digests([(whole[rect.slices], rect)])
    assert np.array_equal(compute_digests([(whole.cuda()[rect.slices], rect)]), found)
    assert np.array_equal(compute_digests([(whole[rect.slices].contiguous().cuda(), rect)]), found)
