"""The preflight's prediction for a policy rank against what torch's allocator held at most."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mega_agentrl.estimate.device import GIB, Device
from mega_agentrl.estimate.policy_memory import policy_memory
from tests.estimate.configs import configured
from tests.estimate.shapes import released
from tests.gpu.gpus import FOUND, needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
TOKENS, ROW = 8192, 1024


def most_allocated(seat, config, shape):
    """Bytes at most in supervised steps of two micro-batches of TOKENS tokens."""
    from mega_agentrl.actor.heads import VocabHead
    from mega_agentrl.actor.loss import SUPERVISED_METRICS, SupervisedObjective
    from mega_agentrl.actor.model import vocab_shard
    from mega_agentrl.actor.network import Network, Seat

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network = Network(config, shape, Seat(**seat))
    for parameter in network.parameters.values():
        parameter.detach().normal_(0.0, 0.02)
    network.optimizer.reload()
    batch = full_rows(2 * TOKENS // ROW, shape.vocab)
    mask_BT = batch.mask_BT
    head = VocabHead(
        temperature=1.0,
        shard=vocab_shard(shape, network.groups),
        num_positions=mask_BT.size(1),
    )
    for _ in range(3):
        result = network.step(
            batch, mask_BT, head, SupervisedObjective(mask_BT), SUPERVISED_METRICS, lr=1e-5
        )
        assert result.taken
    assert network.most_tokens == TOKENS
    network.close()
    return torch.cuda.max_memory_allocated() - before


def full_rows(num_rows, vocab):
    """Rows of which a model reads ROW tokens, one of the prompt."""
    from mega_agentrl.types.batch import TrainBatch

    zeros_BT = torch.zeros(num_rows, ROW)
    return TrainBatch(
        prompt_ids=((1,),) * num_rows,
        response_BT=torch.randint(0, vocab, zeros_BT.shape),
        length_B=torch.full((num_rows,), ROW),
        mask_BT=torch.ones(num_rows, ROW, dtype=torch.bool),
        group_B=torch.zeros(num_rows, dtype=torch.int64),
        reward_B=torch.zeros(num_rows),
        node_BT=zeros_BT.long(),
        rollout_logp_BT=zeros_BT,
        rollout_entropy_BT=zeros_BT,
        version_BT=zeros_BT.long(),
    )


@pytest.mark.parametrize("num_layers", [4, 12])
def test_predicted_and_measured_are_within_fifteen_percent(rank_pool, num_layers):
    shape = dataclasses.replace(released("qwen3-4b"), num_layers=num_layers)
    config = configured(prompt=1, response=ROW - 1, tokens=TOKENS)
    # The context and the libraries are not the allocator's.
    device = Device(policy_runtime_bytes=0)
    (memory,) = policy_memory(config, shape, device, micro_batch_tokens=TOKENS)
    room = torch.cuda.mem_get_info()[1] if FOUND else 0
    if memory.peak > 0.8 * room:
        pytest.skip(f"needs {memory.peak / 0.8 / GIB:.0f} GiB, the GPU has {room / GIB:.0f}")
    (measured,) = rank_pool.run(most_allocated, 1, config, shape)
    assert measured == pytest.approx(memory.peak, rel=0.15)
