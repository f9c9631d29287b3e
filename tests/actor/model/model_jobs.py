"""Jobs of the model tests, run on each rank: build, load, differentiate, count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mega_agentrl.actor import device, megatron_compat
from mega_agentrl.actor.model import gpt_model
from mega_agentrl.actor.model.heads import LogProbHead
from mega_agentrl.actor.parallel import process_groups
from mega_agentrl.actor.training.pipeline_schedule import PipelineSchedule
from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape
from mega_agentrl.vision.processor import ImageProcessor
from tests.rank_shards import pack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiated:
    """Results of one rank."""

    values: list[tuple[tuple[int, ...], torch.Tensor]]
    """Rows and `[R, T]` outputs of each micro-batch, on the last stage."""
    gradients: list[tuple[str, Any, torch.Tensor]]
    """Hugging Face name, rectangle and values of every block of the rank."""
    counted: int
    """Elements of this rank that count in the gradient norm."""


def differentiate(rank_info, folder, layout, batch):
    """Return the outputs of the model and the gradients of their advantage-weighted sum."""
    megatron_compat.init_device(rank_info["rank"])
    groups = process_groups.init_process_groups(layout, **rank_info)
    coordinates = groups.coordinates
    shape = ModelShape.from_folder(folder)
    processor = ImageProcessor(folder) if shape.vision else None
    chunks = gpt_model.build_model_chunks(
        shape, groups, layout, torch.float32, image_processor=processor
    )
    shards = megatron_layout(shape, coordinates.model_parallel_rank)
    gpt_model.check_parameter_shapes(chunks, shards)
    parameters = {
        f"{coordinates.model_parallel_rank.param_prefix(number)}{name}": parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    read_shards(folder, shards, hf_shapes(shape), parameters)
    wrapped = gpt_model.wrap_with_ddp(chunks, groups, layout)
    head = partial(scalar_head, num_positions=batch.response_BT.size(1))
    if shape.head is HeadKind.vocab:
        shard, width = gpt_model.make_vocab_shard(shape, groups), batch.response_BT.size(1)
        head = LogProbHead(temperature=1.0, vocab_shard=shard, num_positions=width)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    objective = partial(weighted_sum, batch.advantage_BT * batch.mask_BT)
    shares = PipelineSchedule(wrapped, groups).forward_backward(
        micro_batches(batch, layout, coordinates, has_images=shape.vision is not None),
        head,
        objective,
    )
    gpt_model.release_moe_routing_graph(chunks)
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
        counted=counted(parameters.values(), groups),
    )


def query_key_value(rank_info, folder, layout):
    """Return query, key and value of the first layer for ten fixed hidden states."""
    megatron_compat.init_device(rank_info["rank"])
    groups = process_groups.init_process_groups(layout, **rank_info)
    shape = ModelShape.from_folder(folder)
    (chunk,) = gpt_model.build_model_chunks(shape, groups, layout, torch.float32)
    shards = megatron_layout(shape, groups.coordinates.model_parallel_rank)
    read_shards(folder, shards, hf_shapes(shape), dict(chunk.named_parameters()))
    hidden_S1D = torch.randn(10, 1, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return chunk.decoder.layers[0].self_attention.get_query_key_value_tensors(hidden_S1D)


def micro_batches(batch, layout, coordinates, *, has_images=False):
    """Return two micro-batches of the data rank's rows, the first with a single row."""
    rows = list(range(batch.num_rows))[coordinates.data_rank :: coordinates.data_size]
    return [
        pack_rows(
            batch,
            part,
            batch.mask_BT,
            device.current_device(),
            multiple=layout.tensor if layout.sequence_parallel else 1,
            context_rank=coordinates.context_rank,
            context_size=coordinates.context_size,
            has_images=has_images,
        )
        for part in (rows[:1], rows[1:])
    ]


def scalar_head(chunk, micro, hidden_S1D, num_positions):
    value_N = hidden_S1D.squeeze(1)[micro.predict_N] @ chunk.output_weight()[0]
    return (micro.to_rows(value_N, num_positions),)


def weighted_sum(weight_BT, micro, value_RT, *_):
    loss = (weight_BT[list(micro.rows)] * value_RT).sum()
    return loss, {"loss": loss.detach(), "values": (micro.rows, value_RT.detach().clone())}


def counted(parameters, groups):
    """Count the elements of this rank in Megatron's gradient norm, without replicas."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    coordinates = groups.coordinates
    return sum(
        parameter.numel()
        for parameter in parameters
        if param_is_not_shared(parameter)
        and param_is_not_tensor_parallel_duplicate(
            parameter, groups.pg_collection.tp, groups.pg_collection.expt_tp
        )
        and (
            coordinates.data_rank == coordinates.context_rank == 0
            if parameter.allreduce
            else coordinates.expert_data_rank == 0
        )
    )
