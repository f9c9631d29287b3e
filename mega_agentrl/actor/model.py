"""The policy network: Megatron-core's `GPTModel` with dense Qwen3's shape.

Local layer spec with our packed attention; the forward pass ends at the hidden states of the
last norm, because log-probs come from `vocab_parallel` without whole logits. Weights are
uninitialised until a checkpoint is loaded, and no Megatron fusion that needs Transformer
Engine or Apex is on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from mega_agentrl.actor import device
from mega_agentrl.actor.attention import PackedAttention, PackedRotary, PackedRows
from mega_agentrl.actor.vocab_parallel import VocabShard
from mega_agentrl.reshard.names import padded_vocab

if TYPE_CHECKING:
    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.actor.packing import MicroBatch
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.model_shape import ModelShape


class PolicyModel(GPTModel):
    """One stage: embedding (first), layers, last norm and output weight (last)."""

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states

    def _is_in_embd_group(self) -> bool:
        # Megatron would now add up the tied weights of both stages to start them equal; they
        # are loaded from the same checkpoint rows instead.
        return False

    def output_weight(self) -> torch.Tensor:
        """[V/tp, D] weight of the output layer; last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def run(self, micro: MicroBatch) -> torch.Tensor:
        """[S, 1, D] hidden states of a packed micro-batch."""
        return self(
            input_ids=micro.token_S[None],
            position_ids=micro.position_S[None],
            attention_mask=None,
            packed_seq_params=PackedRows.of(micro.start_R, micro.position_S),
        )


def transformer_config(shape: ModelShape, groups: Groups) -> TransformerConfig:
    """Megatron's configuration of the model on this rank."""
    position, dtype = groups.position, device.train_dtype()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=position.tensor_size,
        pipeline_model_parallel_size=position.pipeline_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Packed micro-batches differ in length from one to the next; Megatron then wants this
        # dispatcher named, experts or not.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss is divided by a global count before the backward pass, so gradients are
        # summed over data ranks and never rescaled.
        calculate_per_token_loss=True,
    )


def build_model(shape: ModelShape, groups: Groups) -> PolicyModel:
    """This rank's stage, on its device, weights not yet loaded."""
    position = groups.position
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    model = PolicyModel(
        config=transformer_config(shape, groups),
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(shape, position.tensor_size),
        max_sequence_length=shape.max_positions,
        pre_process=position.first_stage,
        post_process=position.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        pg_collection=groups.collection,
    )
    model.rotary_pos_emb = PackedRotary(shape.head_dim, shape.rope_base)
    for parameter in model.parameters():
        # Megatron marks shards while it initialises them, which is skipped; the mark decides
        # whose gradients count in the norm. Dense Qwen3 cuts every matrix and no vector.
        parameter.tensor_model_parallel = parameter.ndim > 1
    return model.to(device.device())


def wrap_data_parallel(model: PolicyModel, groups: Groups) -> DistributedDataParallel:
    """Float32 gradient buffers, summed over the data group after the last micro-batch."""
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
        ),
        module=model,
        pg_collection=groups.collection,
    )


def vocab_shard(shape: ModelShape, groups: Groups) -> VocabShard:
    """This rank's rows of the output layer."""
    position = groups.position
    rows = padded_vocab(shape, position.tensor_size) // position.tensor_size
    start = position.tensor_rank * rows
    return VocabShard(
        start=start,
        num_valid=max(0, min(rows, shape.vocab - start)),
        group=groups.collection.tp if position.tensor_size > 1 else None,
    )


def check_layout(model: torch.nn.Module, layout: list[ShardLayout]) -> None:
    """Assert that the model has the parameters that the name mapping says, shape by shape."""
    expected = {shard.name: shard.shape for shard in layout}
    got = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert got == expected, f"model and mapping differ: {set(got.items()) ^ set(expected.items())}"
