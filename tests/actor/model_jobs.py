"""What the tests of the model run on each rank: build, load, differentiate, count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mega_agentrl.actor import device, groups, model
from mega_agentrl.actor.heads import VocabHead
from mega_agentrl.actor.packing import pack_rows
from mega_agentrl.actor.schedule import Schedule
from mega_agentrl.reshard.checkpoint import read_shards
from mega_agentrl.reshard.model_shape import HeadKind, ModelShape
from mega_agentrl.reshard.names import hf_shapes, megatron_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiated:
    """values: rows and [R, T] outputs of each micro-batch, on the last stage. gradients:
    Hugging Face name, rectangle and values of every block of the rank. counted: elements that a
    gradient norm takes from this rank.
    """

    values: list[tuple[tuple[int, ...], torch.Tensor]]
    gradients: list[tuple[str, Any, torch.Tensor]]
    counted: int


def differentiate(seat, folder, layout, batch):
    """The model's outputs, and the gradients of their sum weighted by the advantages."""
    device.choose_device(seat["rank"])
    joined = groups.join(layout, **seat)
    position = joined.position
    shape = ModelShape.from_folder(folder)
    chunks = model.build_chunks(shape, joined, layout, torch.float32)
    shards = megatron_layout(shape, position.place)
    model.check_layout(chunks, shards)
    parameters = {
        f"{position.place.prefix(number)}{name}": parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    read_shards(folder, shards, hf_shapes(shape), parameters)
    wrapped = model.wrap_data_parallel(chunks, joined, layout)
    head = partial(scalar_head, num_positions=batch.response_BT.size(1))
    if shape.head is HeadKind.vocab:
        shard, width = model.vocab_shard(shape, joined), batch.response_BT.size(1)
        head = VocabHead(temperature=1.0, shard=shard, num_positions=width)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    objective = partial(weighted_sum, batch.advantage_BT * batch.mask_BT)
    shares = Schedule(wrapped, joined).train(
        micro_batches(batch, layout, position), head, objective
    )
    model.forget_routing(chunks)
    return Differentiated(
        values=[share["values"] for share in shares],
        gradients=[
            (
                block.hf_name,
                block.hf_rect,
                parameters[shard.name].main_grad[block.local_rect.slices],
            )
            for shard in shards
            for block in shard.blocks
        ],
        counted=counted(parameters.values(), joined),
    )


def query_key_value(seat, folder, layout):
    """What the first layer's attention makes of ten fixed hidden states, on each rank."""
    device.choose_device(seat["rank"])
    joined = groups.join(layout, **seat)
    shape = ModelShape.from_folder(folder)
    (chunk,) = model.build_chunks(shape, joined, layout, torch.float32)
    shards = megatron_layout(shape, joined.position.place)
    read_shards(folder, shards, hf_shapes(shape), dict(chunk.named_parameters()))
    hidden_S1D = torch.randn(10, 1, shape.hidden, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return chunk.decoder.layers[0].self_attention.get_query_key_value_tensors(hidden_S1D)


def micro_batches(batch, layout, position):
    """Two of the data rank's rows, one of them with a single row."""
    rows = list(range(batch.num_rows))[position.data_rank :: position.data_size]
    return [
        pack_rows(
            batch,
            part,
            batch.mask_BT,
            device.device(),
            multiple=layout.tensor if layout.sequence else 1,
            context_rank=position.context_rank,
            context_size=position.context_size,
        )
        for part in (rows[:1], rows[1:])
    ]


def scalar_head(chunk, micro, hidden_S1D, num_positions):
    value_N = hidden_S1D.squeeze(1)[micro.predict_N] @ chunk.output_weight()[0]
    return (micro.to_rows(value_N, num_positions),)


def weighted_sum(weight_BT, micro, value_RT, *_):
    loss = (weight_BT[list(micro.rows)] * value_RT).sum()
    return loss, {"loss": loss.detach(), "values": (micro.rows, value_RT.detach().clone())}


def counted(parameters, joined):
    """Elements whose gradient Megatron's norm takes from this rank, replicas left out."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    position = joined.position
    return sum(
        parameter.numel()
        for parameter in parameters
        if param_is_not_shared(parameter)
        and param_is_not_tensor_parallel_duplicate(parameter, joined.collection.tp)
        and (position.first_replica if parameter.allreduce else position.expert_data_rank == 0)
    )
