"""The network of one rank: Megatron-core's `GPTModel` in a checkpoint's shape, chunk by chunk.

The forward pass ends at the hidden states of the last norm: log-probs come from
`vocab_parallel` without whole logits, values from a scalar head. Under sequence parallelism the
last chunk gathers the tokens again, because both heads work on all of them; their gradient with
respect to the hidden states is whole on every tensor rank, so the way back is a plain split.
Weights are uninitialised until a checkpoint is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from mega_agentrl.actor import device
from mega_agentrl.actor.attention import PackedRows
from mega_agentrl.actor.marks import mark
from mega_agentrl.actor.rotary import PackedRotary, set_attention_factor
from mega_agentrl.actor.spec import decoder_spec
from mega_agentrl.actor.vocab_parallel import VocabShard
from mega_agentrl.reshard.model_shape import HeadKind
from mega_agentrl.reshard.names import padded_vocab

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.actor.packing import MicroBatch
    from mega_agentrl.config.schema import ParallelConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.model_shape import ModelShape, MoeShape


class ScalarHead(torch.nn.Module):
    """Weight [1, D] in place of the output layer, whole on every tensor rank."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(1, hidden, dtype=dtype, device=device.device())
        )


class PolicyModel(GPTModel):
    """One chunk: embedding (first), layers, last norm and head's weight (last)."""

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states

    def _is_in_embd_group(self) -> bool:
        # Megatron would now add up the tied weights of both stages to start them equal; they
        # are loaded from the same checkpoint rows instead.
        return False

    def output_weight(self) -> torch.Tensor:
        """[V/tp, D] weight of the output layer, or [1, D] of a scalar head; last chunk only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def run(self, micro: MicroBatch) -> torch.Tensor:
        """[S, 1, D] hidden states of a packed micro-batch; on all but the last chunk what the
        next one takes, under sequence parallelism [S/tp, 1, D].
        """
        rows = PackedRows.of(
            micro.start_R,
            micro.position_S,
            context_rank=micro.context_rank,
            context_size=micro.context_size,
        )
        hidden = self(
            input_ids=micro.token_S[None],
            position_ids=micro.position_S[None],
            attention_mask=None,
            packed_seq_params=rows,
        )
        if self.post_process and self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden


def transformer_config(
    shape: ModelShape, groups: Groups, layout: ParallelConfig, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration of the model on this rank.

    Raises `ValueError` for a mixture whose only expert per token has a weight of always 1.
    """
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        # Of all biases only these; the others are in the layer spec.
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_cuts(groups, layout),
        **_experts(shape.moe),
        **_kernels(),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        # Packed micro-batches differ in length from one to the next; Megatron then wants this
        # dispatcher named, experts or not.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss is divided by a global count before the backward pass, so gradients are
        # summed over data ranks and never rescaled.
        calculate_per_token_loss=True,
    )
    set_attention_factor(config, shape.rope)
    return config


def _cuts(groups: Groups, layout: ParallelConfig) -> dict[str, Any]:
    place = groups.position.place
    return {
        "tensor_model_parallel_size": place.tensor_size,
        "pipeline_model_parallel_size": place.pipeline_size,
        "virtual_pipeline_model_parallel_size": (
            place.virtual_size if place.virtual_size > 1 else None
        ),
        "context_parallel_size": groups.position.context_size,
        "expert_model_parallel_size": place.expert_size,
        "expert_tensor_parallel_size": place.expert_tensor_size,
        "sequence_parallel": layout.sequence,
    }


def _kernels() -> dict[str, Any]:
    """Where weights are made, and which of Megatron's fused kernels are on."""
    on_gpu = device.has_cuda()
    return {
        "use_cpu_initialization": not on_gpu,
        "gradient_accumulation_fusion": device.has_fused_gradients(),
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "masked_softmax_fusion": False,
        # Leaves out the factor of cosines and sines that yarn asks for.
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def _experts(moe: MoeShape | None) -> dict[str, Any]:
    if moe is None:
        return {}
    if moe.top_k == 1 and moe.norm_topk:
        raise ValueError(
            "num_experts_per_tok=1 with norm_topk_prob=true: expected several experts per token "
            "or norm_topk_prob=false; the router would get no gradient; probable cause: an "
            "edited config.json"
        )
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_layer_freq": [int(sparse) for sparse in moe.sparse],
        "moe_router_topk": moe.top_k,
        # A softmax over the chosen logits is the softmax over all of them, rescaled to sum to 1.
        "moe_router_pre_softmax": not moe.norm_topk,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": device.has_transformer_engine(),
    }


def build_chunks(
    shape: ModelShape, groups: Groups, layout: ParallelConfig, dtype: torch.dtype
) -> list[PolicyModel]:
    """This rank's chunks (`layout.virtual` of them), on its device, weights not yet loaded.

    The head is that of `shape.head`, whatever the checkpoint's body comes from.
    """
    config = transformer_config(shape, groups, layout, dtype)
    return [
        _build_chunk(shape, groups, config, chunk)
        for chunk in range(groups.position.place.virtual_size)
    ]


def _build_chunk(
    shape: ModelShape, groups: Groups, config: TransformerConfig, chunk: int
) -> PolicyModel:
    place = groups.position.place
    model = PolicyModel(
        config=config,
        transformer_layer_spec=decoder_spec(shape, place, chunk),
        vocab_size=padded_vocab(shape, place.tensor_size),
        max_sequence_length=shape.max_positions,
        pre_process=place.holds_embedding(chunk),
        post_process=place.holds_head(chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied and shape.head is HeadKind.vocab,
        position_embedding_type="rope",
        pg_collection=groups.collection,
        vp_stage=chunk,
    )
    model.rotary_pos_emb = PackedRotary(shape.head_dim, shape.rope)
    if shape.head is HeadKind.scalar and place.holds_head(chunk):
        model.output_layer = ScalarHead(shape.hidden, config.params_dtype)
    model.to(device.device())
    mark(model, shape, sequence=config.sequence_parallel)
    return model


def wrap_data_parallel(
    chunks: Sequence[PolicyModel], groups: Groups, layout: ParallelConfig
) -> list[DistributedDataParallel]:
    """Float32 gradient buffers, summed over data ranks after the last micro-batch.

    Summing during the backward pass is not asked for: it would hide one reduction behind the
    last of many micro-batches.
    """
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                use_distributed_optimizer=layout.distributed_optimizer,
            ),
            module=chunk,
            pg_collection=groups.collection,
        )
        for chunk in chunks
    ]


def vocab_shard(shape: ModelShape, groups: Groups) -> VocabShard:
    """This rank's rows of the output layer."""
    place = groups.position.place
    rows = padded_vocab(shape, place.tensor_size) // place.tensor_size
    start = place.tensor_rank * rows
    return VocabShard(
        start=start,
        num_valid=max(0, min(rows, shape.vocab - start)),
        group=groups.collection.tp if place.tensor_size > 1 else None,
    )


def check_layout(chunks: Sequence[torch.nn.Module], shards: Sequence[ShardLayout]) -> None:
    """Assert that the chunks have the parameters that the name mapping says, shape by shape."""
    expected = {shard.name: shard.shape for shard in shards}
    got = {
        f"chunk{number}.{name}" if len(chunks) > 1 else name: tuple(parameter.shape)
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    assert got == expected, f"model and mapping differ: {set(got.items()) ^ set(expected.items())}"


def forget_routing(chunks: Sequence[torch.nn.Module]) -> None:
    """Let go of the graph behind the last routing of tokens to experts.

    It holds mcore's gradient hooks through C++, where Python's collector cannot see it: a model
    that nobody needs, and its groups of processes, would stay.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if dispatcher := getattr(module, "token_dispatcher", None):
                dispatcher.probs = None
