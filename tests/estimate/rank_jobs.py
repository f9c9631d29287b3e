"""Functions that the estimate tests run on each rank: build a model and count its bytes."""

from __future__ import annotations

import numpy as np
import torch

from mega_agentrl.actor.checkpoint.sharded_state import copy_state_to_host
from mega_agentrl.actor.megatron_model import MegatronModel, RankInfo
from mega_agentrl.actor.model.attention_plan import split_into_segments
from mega_agentrl.actor.model.gpt_model import make_vocab_shard
from mega_agentrl.actor.model.heads import LogProbHead
from mega_agentrl.actor.parallel.process_groups import RankCoordinates
from mega_agentrl.actor.training import optimizer, packing
from mega_agentrl.actor.training.offload import BLOCK_BYTES, HostBlocks
from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.rank_shards import pack_rows
from tests.train_batches import batch_of_rows
from tests.tree_batches import make_tree_batch

ROWS, TOKENS, PROMPT = 8, 64, 8
"""Rows of a micro-batch; tokens a model reads of each row; prompt tokens among them."""


def num_bytes(tensors):
    """Return the bytes of the tensors' storages, counting each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def grad_buffers(model):
    for chunk in model.chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers


def held_bytes(rank_info, folder, layout, dtype, freeze_vision=False):
    """Return the bytes of a rank.

    They are (stage, replica, expert replica), the bytes of weights, gradients and optimizer, and
    those of the copy that a checkpoint is written from.
    """
    model_config = ModelConfig(path=folder, dtype=Dtype(dtype), freeze_vision=freeze_vision)
    config = TrainConfig(model=model_config, parallel=layout)
    model = MegatronModel(config, ModelShape.from_folder(folder), RankInfo(**rank_info))
    for part in model.optimizer._chained_optimizers:
        optimizer._init_missing_moments(part)
    weights = list(model.parameters.values())
    weight_storages = {weight.untyped_storage().data_ptr() for weight in weights}
    # In float32 without the distributed optimizer, the optimizer steps the weights themselves.
    state = [
        t
        for t in model.optimizer.state_tensors()
        if t.untyped_storage().data_ptr() not in weight_storages
    ]
    position = RankCoordinates.from_rank(rank_info["rank"], layout)
    replica = position.data_rank * position.context_size + position.context_rank
    return (
        (position.model_parallel_rank.pipeline_rank, replica, position.expert_data_rank),
        (
            num_bytes(weights),
            num_bytes([buffer.grad_data for buffer in grad_buffers(model)]),
            num_bytes(state),
        ),
        copied_bytes(model),
    )


def copied_bytes(model):
    """Return the bytes that the rank copies to host memory for a checkpoint."""
    reserved = []

    class CountedBlocks(HostBlocks):
        def reserve(self, num_bytes):
            reserved.append(num_bytes)
            super().reserve(num_bytes)

    copy_state_to_host(model, CountedBlocks(BLOCK_BYTES))
    return reserved[0]


class SavedTensorCounter:
    """Counts the bytes that autograd saves for the backward pass, current and peak."""

    def __init__(self, model):
        self._not_counted = {
            tensor.untyped_storage().data_ptr()
            for chunk in model.chunks
            for tensor in chunk.module.parameters()
        }
        self._uses = {}
        self.current = self.peak = 0

    def pack(self, tensor):
        return _SavedTensor(self, tensor)

    def add(self, storage):
        key = storage.data_ptr()
        if key in self._not_counted:
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)

    def remove(self, storage):
        key = storage.data_ptr()
        if key in self._uses:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.current -= storage.nbytes()


class _SavedTensor:
    """A saved tensor, counted as long as the graph holds it."""

    def __init__(self, counter, tensor):
        self._counter, self.tensor = counter, tensor
        counter.add(tensor.untyped_storage())

    def __del__(self):
        self._counter.remove(self.tensor.untyped_storage())


def peak_saved_bytes(rank_info, folder, layout, dtype, num_micro_batches):
    """Return (stage, peak saved bytes) of a pass over micro-batches of ROWS full rows."""
    config = TrainConfig(model=ModelConfig(path=folder, dtype=Dtype(dtype)), parallel=layout)
    model = MegatronModel(config, ModelShape.from_folder(folder), RankInfo(**rank_info))
    model.load_hf(folder)
    batch = full_rows(ROWS * num_micro_batches * layout.data)
    position = RankCoordinates.from_rank(rank_info["rank"], layout)
    first = ROWS * num_micro_batches * position.data_rank
    micros = [
        pack_rows(
            batch,
            range(first + number * ROWS, first + (number + 1) * ROWS),
            batch.mask_BT,
            torch.device("cpu"),
            multiple=layout.tensor if layout.sequence_parallel else 1,
            context_rank=position.context_rank,
            context_size=position.context_size,
        )
        for number in range(num_micro_batches)
    ]
    shard = make_vocab_shard(model.shape, model.groups)
    head = LogProbHead(temperature=1.0, vocab_shard=shard, num_positions=batch.response_BT.size(1))
    counter = SavedTensorCounter(model)
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda saved: saved.tensor):
        model._pipeline_schedule.forward_backward(micros, head, sum_loss)
    return position.model_parallel_rank.pipeline_rank, counter.peak


def peak_saved_bytes_of_tree(rank_info, folder, layout, dtype, tree):
    """Return (tokens, keys, peak saved bytes) of a pass over a micro-batch of one tree."""
    config = TrainConfig(model=ModelConfig(path=folder, dtype=Dtype(dtype)), parallel=layout)
    model = MegatronModel(config, ModelShape.from_folder(folder), RankInfo(**rank_info))
    model.load_hf(folder)
    rows = PackedRows.from_batch(make_tree_batch((tree,), vocab=61))
    select_M = np.ones(rows.response_start_R1[-1], dtype=bool)
    context_rank = RankCoordinates.from_rank(rank_info["rank"], layout).context_rank
    micro = packing.pack_rows(
        rows,
        range(rows.num_rows),
        select_M,
        torch.device("cpu"),
        context_rank=context_rank,
        context_size=layout.context,
    )
    segments = split_into_segments(micro.start_G, micro.branches, context_rank, layout.context)
    shard = make_vocab_shard(model.shape, model.groups)
    head = LogProbHead(temperature=1.0, vocab_shard=shard, num_positions=rows.num_positions)
    counter = SavedTensorCounter(model)
    hooks = torch.autograd.graph.saved_tensors_hooks

    class CountingHooks(hooks):
        """The attention's own hooks, inside which those around the pass are not called."""

        def __init__(self, pack, unpack):
            super().__init__(
                lambda tensor: (
                    counter.pack(found) if torch.is_tensor(found := pack(tensor)) else found
                ),
                lambda saved: unpack(getattr(saved, "tensor", saved)),
            )

    torch.autograd.graph.saved_tensors_hooks = CountingHooks
    try:
        with hooks(counter.pack, lambda saved: saved.tensor):
            model._pipeline_schedule.forward_backward([micro], head, sum_loss)
    finally:
        torch.autograd.graph.saved_tensors_hooks = hooks
    return len(micro.token_S), sum(part.num_keys for part in segments), counter.peak


def sum_loss(micro, logp_RT, entropy_RT):
    loss = logp_RT.sum() + entropy_RT.sum()
    return loss, {"loss": loss.detach(), "num_tokens": torch.zeros(())}


def full_rows(num_rows):
    """Return identical rows of which a model reads TOKENS tokens each."""
    row_T = torch.cat([torch.arange(PROMPT), torch.arange(TOKENS - PROMPT + 1) % 61])
    return batch_of_rows(row_T.expand(num_rows, -1), PROMPT)
