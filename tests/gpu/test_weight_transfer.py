"""Weights from trainer ranks to rollout ranks in the memory of GPUs: what arrives is what was
sent, bit by bit, and the digests that GPUs compute say so.

One GPU: frames stay in the sender's memory, which CUDA IPC maps. Two: NCCL, and where ranks of
both sides share GPUs, both at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.proof import Court, all_regions, regions_of
from mega_agentrl.reshard.transport import WeightLink
from mega_agentrl.reshard.whereabouts import locations
from tests.gpu import transfer_jobs
from tests.gpu.gpus import needs_gpus
from tests.reshard.fake_trainer import source_layouts
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import rollout_layout
from tests.reshard.wire.ranks import ADDRESS, ranks
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu
BUCKET_BYTES = 20_000
PLACES = [
    pytest.param([0], [0], marks=needs_gpus(1), id="ipc"),
    pytest.param([0, 0], [0, 0], marks=needs_gpus(1), id="ipc, two on each side"),
    pytest.param([0], [1], marks=needs_gpus(2), id="nccl"),
    pytest.param([0, 1], [0, 1], marks=needs_gpus(2), id="both"),
    pytest.param([0, 1], [2, 3], marks=needs_gpus(4), id="nccl, four"),
]


@dataclass
class Sides:
    """Trainer ranks first. devices: of all."""

    group: object
    devices: list[int]
    sources: list
    sinks: list
    names: list
    dtype: str

    def connect(self) -> None:
        everyone = range(len(self.devices))
        places = locations(
            [self.group.ask(r, transfer_jobs.take_device, self.devices[r]) for r in everyone]
        )
        self.regions = all_regions(self.sinks)
        self.court = Court(self.sources, self.regions)
        plan = plan_delivery(
            self.sources, self.sinks, places, self.dtype, names=self.names,
            bucket_bytes=BUCKET_BYTES,
        )  # fmt: skip
        link = WeightLink(
            address=ADDRESS,
            port=self.group.store.port,
            key="link",
            plan=plan,
            timeout_s=30.0,
            locations=tuple(places),
        )
        for rank, layout in enumerate([*self.sources, *self.sinks]):
            self.group.start(rank, transfer_jobs.join_link, link, layout, rank)
        for rank in everyone:
            self.group.finish(rank)

    @property
    def rollout(self) -> range:
        return range(len(self.sources), len(self.devices))

    def update(self, folder, version) -> list:
        """What each rollout rank must have, as in `Regions.mismatches`."""
        trainers = range(len(self.sources))
        for rank in trainers:
            order = (folder, version, self.regions, self.dtype)
            self.group.start(rank, transfer_jobs.send, *order)
        for rank in self.rollout:
            self.group.start(rank, transfer_jobs.receive, version, self.dtype)
        said = [self.group.finish(rank) for rank in trainers]
        for rank in self.rollout:
            self.group.finish(rank)
        number = {region: at for at, region in enumerate(self.regions)}
        digests = self.court.expected(said)
        return [digests[[number[region] for region in regions_of(sink)]] for sink in self.sinks]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model("qwen3", root / str(seed), seed=seed) for seed in range(2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("trainers", "engines"), PLACES)
def test_what_arrives_is_what_was_sent(folders, trainers, engines, dtype):
    shape = ModelShape.from_folder(folders[0])
    sinks = [rollout_layout(shape, rank, len(engines)) for rank in range(len(engines))]
    with ranks(len(trainers) + len(engines)) as group:
        sides = Sides(
            group=group,
            devices=[*trainers, *engines],
            sources=source_layouts(folders[0], len(trainers), 1),
            sinks=sinks,
            names=list(hf_shapes(shape)),
            dtype=dtype,
        )
        sides.connect()
        for version in range(1, 5):
            folder = folders[version % 2]
            tensors = load_file(folder / "model.safetensors")
            for rank, sink, digests in zip(
                sides.rollout, sinks, sides.update(folder, version), strict=True
            ):
                assert group.ask(rank, transfer_jobs.mismatches, digests) == []
                got = group.ask(rank, transfer_jobs.bits)
                for name, expected in cut(sink, tensors).items():
                    sent = transfer_jobs.bits_of(expected.to(getattr(torch, dtype)))
                    assert np.array_equal(got[name], sent), name
        check_a_wrong_bit_shows(sides, digests)
        for rank in range(len(sides.devices)):
            group.ask(rank, transfer_jobs.leave)


def check_a_wrong_bit_shows(sides, digests):
    last = sides.rollout[-1]
    shard = sides.sinks[-1][1]
    sides.group.ask(last, transfer_jobs.spoil, shard.name)
    (wrong,) = sides.group.ask(last, transfer_jobs.mismatches, digests)
    assert wrong.hf_name in {block.hf_name for block in shard.blocks}


@needs_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [(0, 64), (3, 40), (7, 8)])
def test_a_digest_is_the_same_on_both_devices(columns, dtype):
    from mega_agentrl.reshard.digest import digests
    from mega_agentrl.reshard.layout import Rect

    whole = torch.randn(50, 64).to(dtype)
    rect = Rect((11, columns[0]), (37, columns[1]))
    found = digests([(whole[rect.slices], rect)])
    assert np.array_equal(digests([(whole.cuda()[rect.slices], rect)]), found)
    assert np.array_equal(digests([(whole[rect.slices].contiguous().cuda(), rect)]), found)
