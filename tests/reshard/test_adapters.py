"""Adapters that ranks merge themselves: equal bits in any layout, and faults of their delivery.

A delivery packs the factors of trainer ranks into the buckets of a plan, unpacks them at a rollout
rank, merges them there, and compares digests with those that the trainer ranks compute from their
own merged weights. Each of the injected faults spoils one thing in between; `Delivery.wrong` has
the tensors whose digests then differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch

from mega_agentrl.config.sections.policy import LoraConfig
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.adapters import (
    AdapterReceiver,
    exact_product,
    merge_adapters,
)
from mega_agentrl.reshard.frames import FrameCodec, num_frame_bytes
from mega_agentrl.reshard.mapping.lora_layout import adapter_of, lora_shapes, lora_shards
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, is_hf_vision_name
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    ReceivedDigests,
    SourceDigests,
    collect_regions,
)
from tests.reshard.faults import cut
from tests.reshard.model_cuts import make_moe_shape, make_shape, trainer_layouts_of
from tests.reshard.rollout_cuts import engine_layouts
from tests.vision_models import make_vision_model

LORA = LoraConfig(rank=3, alpha=6.0)
SCALE = LORA.alpha / LORA.rank
LAYOUTS = {
    "dense TP2 to TP1": (make_shape(num_layers=2, qkv_bias=True), {"tensor": 2}, 1),
    "dense PP2 to TP2": (make_shape(num_layers=2), {"pipeline": 2}, 2),
    "experts TP2-EP2 to TP2": (
        make_moe_shape(num_layers=2, ffn_hidden_size=8),
        {"tensor": 2, "expert": 2},
        2,
    ),
    "experts TP2-ETP2 to TP1": (
        make_moe_shape(num_layers=2, ffn_hidden_size=8),
        {"tensor": 2, "expert_tensor": 2},
        1,
    ),
}
QUICK = ("dense TP2 to TP1", "experts TP2-EP2 to TP2")
"""Layouts on which `make test` tries the faults."""
NUM_FAULTS_PER_KIND = 5
KINDS = (
    "not bound",
    "one module not bound",
    "wrong scale",
    "stale factor",
    "other rank's factor",
    "other layer's factor",
    "flipped bit",
    "weight below is wrong",
    "weight below is merged twice",
    "trainer's replica has drifted",
)


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_a_vision_tower_gets_no_adapters(model, tmp_path):
    shape = ModelShape.from_folder(make_vision_model(model, tmp_path))
    names = lora_shapes(hf_shapes(shape), LORA.rank, LORA.targets)
    assert len(names) == shape.num_layers * 7 * 2
    assert not any(is_hf_vision_name(shape, one) for one in names)


@dataclass(slots=True, kw_only=True)
class Transfer:
    """Both sides of a layout, and the plan between them."""

    trainer: list
    rollout: list
    plan: object
    verifier: DigestVerifier
    regions: list
    base: dict
    """Weights below the adapters, by Hugging Face name."""
    adapters: list
    """Two versions of the factors, by Hugging Face name."""


@cache
def make_transfer(case):
    shape, sizes, tensor_size = LAYOUTS[case]
    trainer, rollout = trainer_layouts_of(shape, **sizes), engine_layouts(shape, tensor_size)
    shapes = hf_shapes(shape)
    factor_shapes = lora_shapes(shapes, LORA.rank, LORA.targets)
    generator = torch.Generator().manual_seed(3)

    def draw(shapes):
        return {name: torch.randn(size, generator=generator) for name, size in shapes.items()}

    plan = plan_transfer(
        [lora_shards(layout, LORA.rank, LORA.targets) for layout in trainer],
        [lora_shards(layout, LORA.rank, LORA.targets) for layout in rollout],
        [RankLocation(0)] * (len(trainer) + len(rollout)),
        "float32",
        names=list(factor_shapes),
        bucket_bytes=2000,
    )
    regions = collect_regions(rollout)
    return Transfer(
        trainer=trainer,
        rollout=rollout,
        plan=plan,
        verifier=DigestVerifier(trainer, regions),
        regions=regions,
        base=draw(shapes),
        adapters=[draw(factor_shapes) for _ in range(2)],
    )


def factors_of(shard, values):
    """The factors of a rank's weight by module, from the values of its parameters."""
    pairs = {}
    for adapter in lora_shards([shard], LORA.rank, LORA.targets):
        module, factor = adapter_of(adapter.blocks[0].hf_name)
        pairs.setdefault(module, {})[factor] = values[adapter.name]
    return {module: (pair["B"], pair["A"]) for module, pair in pairs.items()}


@dataclass
class Delivery:
    """An update of version 1, in which one thing goes wrong."""

    transfer: Transfer
    kind: str = ""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    hit: set = field(default_factory=set)
    """Weights that the fault has spoiled."""

    def __post_init__(self):
        t = self.transfer
        self.shards_by_rank = [
            cut(lora_shards(layout, LORA.rank, LORA.targets), t.adapters[1]) for layout in t.trainer
        ]
        self.drift()
        expected = self.expected_digests()
        self.wrong = set()
        for number, layout in enumerate(t.rollout):
            rank = len(t.trainer) + number
            digests = ReceivedDigests(layout, dict.fromkeys(t.base, "float32"))
            digests.compute(self.merged(rank, layout))
            rows = t.verifier.region_indices(digests.regions)
            self.wrong |= {region.hf_name for region in digests.find_mismatches(expected[rows])}

    def expected_digests(self):
        t = self.transfer
        rank_digests = []
        for layout, values in zip(t.trainer, self.shards_by_rank, strict=True):
            base = cut(layout, t.base)
            merged = {
                shard.name: merge_adapters(
                    base[shard.name], shard, factors_of(shard, values), SCALE
                )
                for shard in layout
            }
            digests = SourceDigests(layout, t.regions, dict.fromkeys(t.base, "float32"))
            rank_digests.append(digests.compute(merged.__getitem__))
        return t.verifier.expected_digests(rank_digests)

    def merged(self, rank, layout):
        receiver = self.receive(rank, layout)
        base = cut(layout, self.transfer.base)
        adapted = [shard for shard in layout if receiver.has_adapters(shard.name)]
        shard = self.rng.choice(adapted)
        name = shard.name
        # Only the first rollout rank is hit.
        kind = self.kind if rank == len(self.transfer.trainer) else ""
        if kind in ("not bound", "wrong scale", "weight below is merged twice"):
            self.hit = {block.hf_name for block in shard.blocks if "weight" in block.hf_name}
        if kind == "wrong scale":
            receiver._scale *= self.rng.choice([0.5, 2.0, 1 / LORA.rank, 1.0000001, -1.0])
            self.hit = set()  # all of them
        if kind == "not bound":
            receiver._factors[name] = {}
        if kind == "weight below is merged twice":
            base[name] = receiver.merge(shard, base[name])
        if kind == "one module not bound":
            module = self.rng.choice(list(receiver._factors[name]))
            del receiver._factors[name][module]
            self.hit = {f"{module}.weight"}
        if kind == "weight below is wrong":
            block = self.rng.choice(shard.blocks)
            values = base[name][block.local_rect.slices]
            flip(values, self.rng)
            self.hit = {block.hf_name}
        if kind in ("stale factor", "other rank's factor", "other layer's factor"):
            self.replace_factor(kind, receiver, layout)
        return [(one, receiver.merge(one, base[one.name])) for one in layout]

    def replace_factor(self, kind, receiver, layout):
        t = self.transfer
        factors = lora_shards(layout, LORA.rank, LORA.targets)
        right = cut(factors, t.adapters[1])
        if kind == "stale factor":
            wrong = cut(factors, t.adapters[0])
            target = self.rng.choice(factors)
            value = wrong[target.name]
        elif kind == "other rank's factor":
            # A rank holds its part of B or A; other ranks hold other rows or columns.
            others = [
                cut(lora_shards(one, LORA.rank, LORA.targets), t.adapters[1])
                for one in t.trainer[::-1] + t.rollout[::-1]
            ]
            choices = [
                (factor, other[factor.name])
                for other in others
                for factor in factors
                if factor.name in other
                and other[factor.name].shape == right[factor.name].shape
                and not other[factor.name].equal(right[factor.name])
            ]
            if not choices:  # one rank holds whole factors: rows of its own, shifted
                target = self.rng.choice(factors)
                choices = [(target, right[target.name].roll(1, 0))]
            target, value = self.rng.choice(choices)
        else:
            pairs = [
                (one, two)
                for one in factors
                for two in factors
                if one.name != two.name and one.shape == two.shape
            ]
            target, other = self.rng.choice(pairs)
            value = right[other.name]
        receiver._values[target.name].copy_(value)
        self.hit = {f"{adapter_of(target.blocks[0].hf_name)[0]}.weight"}

    def receive(self, rank, layout):
        t = self.transfer
        receiver = AdapterReceiver(layout, LORA, torch.float32, torch.device("cpu"))
        codec = FrameCodec(t.plan, receiver.layout)
        sources = [
            FrameCodec(t.plan, lora_shards(one, LORA.rank, LORA.targets)) for one in t.trainer
        ]
        buckets = [b for b in t.plan.buckets if any(hop.target == rank for hop in b.hops)]
        is_hit = self.kind == "flipped bit" and rank == len(t.trainer)
        hit = self.rng.choice(buckets)
        receiver.begin_update()
        for bucket in buckets:
            slot = torch.zeros(num_frame_bytes(bucket), dtype=torch.uint8)
            source = bucket.hops[0].source
            frame = sources[source].write(bucket, slot, self.shards_by_rank[source], 1)
            if is_hit and bucket is hit:
                part = self.rng.choice(codec.batch(bucket).parts)
                flip(part.view(frame), self.rng)
                self.hit = {f"{adapter_of(part.tensor_slice.hf_name)[0]}.weight"}
            receiver.write(codec.batch(bucket), frame)
        receiver.check_complete()
        return receiver

    def drift(self):
        """Change a factor of a trainer rank that sends it to nobody, or to somebody."""
        if self.kind != "trainer's replica has drifted":
            return
        layouts = self.transfer.trainer
        sent = {
            (bucket.hops[0].source, tensor_slice.hf_name)
            for bucket in self.transfer.plan.buckets
            for tensor_slice in bucket.slices
        }
        choices = [
            (rank, adapter)
            for rank, layout in enumerate(layouts)
            for adapter in lora_shards(layout, LORA.rank, LORA.targets)
            if (rank, adapter.blocks[0].hf_name) not in sent
        ]
        if not choices:  # no replicas: the factor changes between transfer and digests
            self.kind = "stale factor"
            return
        rank, adapter = self.rng.choice(choices)
        flip(self.shards_by_rank[rank][adapter.name], self.rng)
        self.hit = {f"{adapter_of(adapter.blocks[0].hf_name)[0]}.weight"}


def flip(values, rng):
    """Flip bits of one element's exponent, so that it is doubled."""
    index = tuple(rng.randrange(size) for size in values.shape)
    values[index] = values[index] * 2


@pytest.mark.parametrize("case", LAYOUTS)
def test_policy_and_rollout_ranks_merge_to_equal_bits(case):
    assert Delivery(make_transfer(case)).wrong == set()


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.extended) for c in LAYOUTS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_delivery_are_found(case, kind):
    """200 faults: 4 layouts, 10 kinds, 5 of each."""
    for seed in range(NUM_FAULTS_PER_KIND):
        delivery = Delivery(make_transfer(case), kind, random.Random(seed))
        assert delivery.wrong, f"{kind}, seed {seed}"
        if delivery.hit:
            assert delivery.wrong & delivery.hit, f"{kind}, seed {seed}: {delivery.hit}"
        if kind == "wrong scale":
            assert len(delivery.wrong) > 4


def test_products_have_equal_bits_whatever_part_is_computed():
    generator = torch.Generator().manual_seed(5)
    left, right = torch.randn(37, 16, generator=generator), torch.randn(16, 53, generator=generator)
    whole = exact_product((left, right))
    torch.testing.assert_close(whole, left @ right, rtol=0, atol=1e-5)
    for rows, columns in ((slice(0, 1), slice(0, 53)), (slice(5, 30), slice(7, 8))):
        part = exact_product((left[rows], right[:, columns]))
        assert torch.equal(part, whole[rows, columns])


def test_missing_factors_are_counted():
    transfer = make_transfer("dense TP2 to TP1")
    receiver = AdapterReceiver(transfer.rollout[0], LORA, torch.float32, torch.device("cpu"))
    receiver.begin_update()
    num_elements = sum(np.prod(shard.shape) for shard in receiver.layout)
    with pytest.raises(InputError) as caught:
        receiver.check_complete()
    assert caught.value.got == num_elements


def test_a_bfloat16_weight_is_rounded_once():
    layout = make_transfer("dense TP2 to TP1").rollout[0]
    shard = next(one for one in layout if one.name.endswith("o_proj.weight"))
    num_rows, num_columns = shard.shape
    weight = torch.ones(shard.shape, dtype=torch.bfloat16)
    left = torch.full((num_rows, 1), 2.0**-8, dtype=torch.bfloat16)
    right = torch.ones((1, num_columns), dtype=torch.bfloat16)
    # 1 + 2^-8 + 2^-16 is rounded up; with the change rounded to 2^-8 first, down to 1.
    factors = {shard.name.removesuffix(".weight"): (left, right)}
    merged = merge_adapters(weight, shard, factors, 1 + 2**-8)
    assert torch.equal(merged, torch.full(shard.shape, 1 + 2**-7, dtype=torch.bfloat16))
