"""The memory estimate of a policy rank against the peak of torch's allocator."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mega_agentrl.estimate.device import GIB, DeviceSpec
from mega_agentrl.estimate.memory.policy import estimate_policy_memory
from tests.estimate.configs import configured
from tests.estimate.shapes import released
from tests.gpu.gpus import FOUND, needs_gpus
from tests.train_batches import batch_of_rows

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
TOKENS, ROW = 8192, 1024


def peak_allocated(rank_info, config, shape):
    """Return the peak bytes of SFT steps with two micro-batches of TOKENS tokens."""
    from mega_agentrl.actor.megatron_model import MegatronModel, RankInfo
    from mega_agentrl.actor.model.gpt_model import make_vocab_shard
    from mega_agentrl.actor.model.heads import LogProbHead
    from mega_agentrl.actor.training.objectives import SFT_METRICS
    from mega_agentrl.batch.packed_rows import PackedRows
    from mega_agentrl.batch.row_sharding import RowSharder
    from tests.rank_shards import sft_objective, targets_of

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network = MegatronModel(config, shape, RankInfo(**rank_info))
    for parameter in network.parameters.values():
        parameter.detach().normal_(0.0, 0.02)
    network.optimizer.reload_master_weights()
    # A model reads ROW tokens of each row, all but the last.
    batch = batch_of_rows(torch.randint(0, shape.vocab_size, (2 * TOKENS // ROW, ROW + 1)), 1)
    rows = PackedRows.from_batch(batch)
    (shard,) = RowSharder.from_config(config).scoring_shards(rows)
    objective, mask_M = sft_objective(batch), targets_of(batch).mask_M
    head = LogProbHead(
        temperature=1.0,
        vocab_shard=make_vocab_shard(shape, network.groups),
        num_positions=rows.num_positions,
    )
    for _ in range(3):
        result = network.train_step(
            rows, shard.micros, mask_M, head, objective, SFT_METRICS, lr=1e-5
        )
        assert result.applied
    assert network.max_micro_batch_tokens == TOKENS
    network.close()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("num_layers", [4, 12])
def test_predicted_and_measured_are_within_fifteen_percent(rank_pool, num_layers):
    shape = dataclasses.replace(released("qwen3-4b"), num_layers=num_layers)
    config = configured(prompt=1, response=ROW - 1, tokens=TOKENS)
    config.data.prompts_per_step, config.rollout.group_size = 2 * TOKENS // ROW, 1
    # CUDA's context and libraries are not in the allocator.
    device = DeviceSpec(policy_runtime_bytes=0)
    (memory,) = estimate_policy_memory(config, shape, device, micro_batch_tokens=TOKENS)
    room = torch.cuda.mem_get_info()[1] if FOUND else 0
    if memory.peak > 0.8 * room:
        pytest.skip(f"needs {memory.peak / 0.8 / GIB:.0f} GiB, the GPU has {room / GIB:.0f}")
    (measured,) = rank_pool.run(peak_allocated, 1, config, shape)
    assert measured == pytest.approx(memory.peak, rel=0.15)
