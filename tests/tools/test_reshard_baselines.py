"""The baselines of the reshard benchmark: what they send, and the shards that the trainer holds."""

import pytest
import torch

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from tests.reshard.model_cuts import make_shape
from tools.reshard_bench.baselines import BASELINES, plan_buckets
from tools.reshard_bench.model import make_shards, trainer_layouts

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("peer", BASELINES)
def test_a_baseline_sends_every_tensor_once_and_whole(peer):
    shape = make_shape(tie_word_embeddings=False)
    shapes = hf_shapes(shape)
    buckets = plan_buckets(peer, trainer_layouts(shape), shapes, bucket_bytes=20_000)
    sent = [tensor for bucket in buckets for tensor in bucket.tensors]
    assert sorted(tensor.name for tensor in sent) == sorted(shapes)
    assert all(tensor.shape == shapes[tensor.name] for tensor in sent)
    assert {bucket.root for bucket in buckets} == {"verl": {0}, "slime": {0, 2}}[peer]
    for bucket in buckets:
        assert bucket.num_bytes <= 20_000 or len(bucket.params) == 1
        ends = [t.offset + 4 * torch.Size(t.shape).numel() for t in bucket.tensors]
        assert [t.offset for t in bucket.tensors] == [0, *ends[:-1]]
        assert ends[-1] == bucket.num_bytes


def test_shards_of_all_trainer_ranks_are_cuts_of_the_same_tensors():
    shape = make_shape(tie_word_embeddings=False)
    layouts = trainer_layouts(shape)
    whole = {name: torch.full(sides, torch.nan) for name, sides in hf_shapes(shape).items()}
    for layout in layouts:
        shards = make_shards(shape, layout)
        for shard in layout:
            for block in shard.blocks:
                there = whole[block.hf_name][block.hf_rect.slices]
                here = shards[shard.name][block.local_rect.slices].reshape(there.shape)
                assert torch.equal(here[~there.isnan()], there[~there.isnan()])  # replicas
                there.copy_(here)
    assert not any(values.isnan().any() for values in whole.values())
    values = torch.cat([tensor.flatten() for tensor in whole.values() if tensor.ndim > 1])
    assert len(values.unique()) > 0.99 * len(values)
