"""What the tests of the estimates run on each rank: build a network, count what it holds."""

from __future__ import annotations

import torch

from mega_agentrl.actor import optimizer_state
from mega_agentrl.actor.groups import Position
from mega_agentrl.actor.heads import VocabHead
from mega_agentrl.actor.model import vocab_shard
from mega_agentrl.actor.network import Network, Seat
from mega_agentrl.actor.packing import pack_rows
from mega_agentrl.config.choices import Dtype
from mega_agentrl.config.schema import ModelConfig, TrainConfig
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.types.batch import TrainBatch

ROWS, TOKENS, PROMPT = 8, 64, 8
"""Rows of a micro-batch, tokens that a model reads of each, prompt tokens among them."""


def num_bytes(tensors):
    """Of the memory under the tensors, each piece once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def buffers(network):
    for chunk in network.chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers


def held(seat, folder, layout, dtype):
    """(stage, replica, expert replica), and bytes of weights, gradients and optimizer state."""
    config = TrainConfig(model=ModelConfig(path=folder, dtype=Dtype(dtype)), parallel=layout)
    network = Network(config, ModelShape.from_folder(folder), Seat(**seat))
    for part in network.optimizer._parts:
        optimizer_state._fill(part)
    weights = list(network.parameters.values())
    ours = {weight.untyped_storage().data_ptr() for weight in weights}
    # In float32 without cut buffers what is stepped are the weights themselves.
    state = [t for t in network.optimizer.tensors() if t.untyped_storage().data_ptr() not in ours]
    position = Position.of(seat["rank"], layout)
    replica = position.data_rank * position.context_size + position.context_rank
    return (
        (position.place.pipeline_rank, replica, position.expert_data_rank),
        (
            num_bytes(weights),
            num_bytes([buffer.grad_data for buffer in buffers(network)]),
            num_bytes(state),
        ),
    )


class Saved:
    """Bytes that autograd keeps for the backward pass: now, and at most so far."""

    def __init__(self, network):
        self._not_counted = {
            tensor.untyped_storage().data_ptr()
            for chunk in network.chunks
            for tensor in chunk.module.parameters()
        }
        self._uses = {}
        self.now = self.most = 0

    def pack(self, tensor):
        return Kept(self, tensor)

    def enter(self, storage):
        key = storage.data_ptr()
        if key in self._not_counted:
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)

    def leave(self, storage):
        key = storage.data_ptr()
        if key in self._uses:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.now -= storage.nbytes()


class Kept:
    """A saved tensor, counted as long as the graph has it."""

    def __init__(self, saved, tensor):
        self._saved, self.tensor = saved, tensor
        saved.enter(tensor.untyped_storage())

    def __del__(self):
        self._saved.leave(self.tensor.untyped_storage())


def most_saved(seat, folder, layout, dtype, num_micro_batches):
    """(stage, most bytes saved at one time) in a pass over micro-batches of ROWS full rows."""
    config = TrainConfig(model=ModelConfig(path=folder, dtype=Dtype(dtype)), parallel=layout)
    network = Network(config, ModelShape.from_folder(folder), Seat(**seat))
    network.load(folder)
    batch = full_rows(ROWS * num_micro_batches * layout.data)
    position = Position.of(seat["rank"], layout)
    first = ROWS * num_micro_batches * position.data_rank
    micros = [
        pack_rows(
            batch,
            range(first + number * ROWS, first + (number + 1) * ROWS),
            batch.mask_BT,
            torch.device("cpu"),
            multiple=layout.tensor if layout.sequence else 1,
            context_rank=position.context_rank,
            context_size=position.context_size,
        )
        for number in range(num_micro_batches)
    ]
    shard = vocab_shard(network.shape, network.groups)
    head = VocabHead(temperature=1.0, shard=shard, num_positions=batch.response_BT.size(1))
    saved = Saved(network)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
        network._schedule.train(micros, head, summed)
    return position.place.pipeline_rank, saved.most


def summed(micro, logp_RT, entropy_RT):
    loss = logp_RT.sum() + entropy_RT.sum()
    return loss, {"loss": loss.detach(), "num_tokens": torch.zeros(())}


def full_rows(num_rows):
    """Rows of which a model reads TOKENS, all the same."""
    width = TOKENS - PROMPT + 1
    zeros_BT = torch.zeros(num_rows, width)
    return TrainBatch(
        prompt_ids=(tuple(range(PROMPT)),) * num_rows,
        response_BT=torch.arange(width).expand(num_rows, -1) % 61,
        length_B=torch.full((num_rows,), width),
        mask_BT=torch.ones(num_rows, width, dtype=torch.bool),
        group_B=torch.zeros(num_rows, dtype=torch.int64),
        reward_B=torch.zeros(num_rows),
        node_BT=zeros_BT.long(),
        rollout_logp_BT=zeros_BT,
        rollout_entropy_BT=zeros_BT,
        version_BT=zeros_BT.long(),
    )
