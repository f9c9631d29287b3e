"""Megatron-core's `GPTModel` in the shape of a checkpoint, as the model chunks of one rank.

The forward pass ends at the hidden states after the final norm: log-probs are computed by
`vocab.vocab_parallel` without full logits, values by a scalar head. Under sequence parallelism
the last chunk gathers all tokens, because both heads need them; each tensor rank's gradient of
its own tokens' hidden states is complete, so the backward pass only splits it. The first chunk of a
vision-language model has the vision tower (`vision_tower`). Weights are uninitialised until a
checkpoint is loaded.

To add a model family: a row of `FAMILIES` in `reshard.mapping.model_shape`, its parameter names
in `reshard.mapping.model_mapping`, Megatron's options in `build_transformer_config`, its modules
in `layer_spec`; a tiny model in `tests/tiny_models.py` and a row of `MODELS` in `test_gpt_model`. A
family with images also needs its tower: a member of `VisionTower` with its settings and tensors in
`reshard.mapping.vision_shape`, transformers' class in `vision_tower`, and a tiny model in
`tests/vision_models.py`.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from enum import EnumType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from mega_agentrl.actor import device
from mega_agentrl.actor.model.exact_layers import exact_silu, use_exact_rotation
from mega_agentrl.actor.model.layer_spec import decoder_block_spec
from mega_agentrl.actor.model.packed_attention import PackedTreeParams, resolve_tree_attention
from mega_agentrl.actor.model.rotary_embedding import (
    PackedMultimodalRotaryEmbedding,
    PackedRotaryEmbedding,
    set_attention_factor,
)
from mega_agentrl.actor.model.route_replay import install_replay
from mega_agentrl.actor.model.vision_tower import build_vision_tower, encode_images
from mega_agentrl.actor.vocab.vocab_parallel import VocabKernel, VocabShard
from mega_agentrl.config.enums import Recompute, TreeAttention
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.lora_layout import is_lora_param
from mega_agentrl.reshard.mapping.model_mapping import (
    MEGATRON_OUTPUT_LAYER,
    is_expert_param,
    is_tensor_replicated,
    is_vision_param,
    padded_vocab_size,
)
from mega_agentrl.reshard.mapping.model_shape import HeadKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.actor.parallel.process_groups import ParallelGroups
    from mega_agentrl.actor.training.packing import MicroBatch
    from mega_agentrl.config.sections.policy import ParallelConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.mapping.model_shape import ModelShape, MoeShape
    from mega_agentrl.vision.processor import ImageProcessor

_NO_TP_GRAD_SUM_SUFFIXES = ("q_layernorm.weight", "k_layernorm.weight", MEGATRON_OUTPUT_LAYER)


class ScalarOutputLayer(torch.nn.Module):
    """Weight `[1, D]` in place of the output layer, replicated on every tensor rank."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(1, hidden, dtype=dtype, device=device.current_device())
        )


class GPTModelChunk(GPTModel):
    """One chunk: layers, with the embedding in the first and norm and head in the last one.

    The first chunk of a vision-language model also has the vision tower.
    """

    vision: torch.nn.Module | None
    image_processor: ImageProcessor | None

    def output_weight(self) -> torch.Tensor:
        """Return the `[V/tp, D]` output weight, or `[1, D]` of a scalar head; last chunk only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def forward_packed(self, micro: MicroBatch) -> torch.Tensor:
        """Run the chunk on a packed micro-batch.

        Returns:
            `[S, 1, D]` hidden states. All but the last chunk return the input of the next one,
            which is `[S/tp, 1, D]` under sequence parallelism.
        """
        hidden = self(micro)
        if self.post_process and self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """Run the chunk; its last stage does not gather the tokens of sequence parallelism."""
        trees = PackedTreeParams.from_micro_batch(micro)
        embedded_S1D = features = None
        if self.vision is not None and micro.images is not None:
            embedded_S1D, features = self._embed_with_images(micro, trees)
        hidden: torch.Tensor = super().forward(
            input_ids=micro.token_S[None],
            position_ids=micro.position_S[None],
            attention_mask=None,
            decoder_input=embedded_S1D,
            packed_seq_params=trees,
            extra_block_kwargs=None if features is None else {"context": features},
            output_processor=_hidden_states,
        )
        return hidden

    def _embed_with_images(
        self, micro: MicroBatch, trees: PackedTreeParams
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the embeddings with features in place of those of placeholders.

        Args:
            micro: The micro-batch.
            trees: Its trees; the places of features that are added after layers are set here.

        Returns:
            `[S, 1, D]` embeddings, `[S/tp, 1, D]` under sequence parallelism, and `[K, P, D]`
            features that are added after the first layers, or None.
        """
        assert self.vision is not None, "the first chunk has the tower"
        assert self.image_processor is not None, "it comes with the tower"
        images = micro.images
        embedded_S1D = self.embedding(
            input_ids=micro.token_S[None], position_ids=micro.position_S[None]
        )
        if images is not None and self.config.sequence_parallel:
            num_tokens = embedded_S1D.size(0)
            start = self.pg_collection.tp.rank() * num_tokens
            images = images.within(start, start + num_tokens)
        if images is None:
            return embedded_S1D, None
        feature_PD, deepstack_KPD = encode_images(self.vision, self.image_processor, images)
        trees.image_place_P = images.place_P
        return embedded_S1D.index_copy(0, images.place_P, feature_PD.unsqueeze(1)), deepstack_KPD


def _hidden_states(hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    """Take the place of Megatron's output layer, and return its input."""
    return hidden_states


def build_transformer_config(
    shape: ModelShape,
    groups: ParallelGroups,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    *,
    tree_attention: TreeAttention = TreeAttention.auto,
    exact: bool = False,
    options: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Build Megatron's configuration of the model on this rank.

    With `exact` it is that of a model with `exact_layers`. `options` are `model.megatron`: values
    of fields that are not set here.

    Raises:
        ConfigError: If the model cannot be computed with the chosen attention on this device.
        ValueError: If a MoE has one expert per token with renormalised weights: the weight of
            that expert would always be 1.
    """
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=exact_silu if exact else functional.silu,
        # Other biases are set by the layer spec.
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_parallelism_options(groups, parallel, shape.num_layers),
        **_recompute_options(parallel.recompute),
        **_moe_options(shape.moe),
        **_kernel_options(),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        variable_seq_lengths=True,
        # The loss is divided by a global count before the backward pass, so gradients are only
        # summed over data ranks, not rescaled.
        calculate_per_token_loss=True,
        **_option_values(options or {}),
    )
    set_attention_factor(config, shape.rope)
    if exact:
        use_exact_rotation(config, shape.rope.attention_factor)
    # Not a field of Megatron's; the core attention reads it, which gets nothing but the config.
    config.tree_attention = resolve_tree_attention(
        tree_attention, device.current_device(), dtype, shape.head_dim
    )
    return config


def _option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options, with members in place of the names of enumerations' members."""
    # Packed micro-batches differ in length; Megatron then refuses its default dispatcher, even
    # without experts.
    values = {"moe_token_dispatcher_type": "alltoall", **options}
    for field in fields(TransformerConfig):
        if isinstance(field.type, EnumType) and isinstance(values.get(field.name), str):
            values[field.name] = field.type[values[field.name]]
    return values


def _parallelism_options(
    groups: ParallelGroups, parallel: ParallelConfig, num_layers: int
) -> dict[str, Any]:
    mp_rank = groups.coordinates.model_parallel_rank
    has_short_ends = num_layers % (mp_rank.pipeline_size * mp_rank.virtual_size) > 0
    return {
        # Megatron numbers the layers as `split_layers` does.
        "account_for_embedding_in_pipeline_split": has_short_ends,
        "account_for_loss_in_pipeline_split": has_short_ends,
        "tensor_model_parallel_size": mp_rank.tensor_size,
        "pipeline_model_parallel_size": mp_rank.pipeline_size,
        "virtual_pipeline_model_parallel_size": (
            mp_rank.virtual_size if mp_rank.virtual_size > 1 else None
        ),
        "context_parallel_size": groups.coordinates.context_size,
        "expert_model_parallel_size": mp_rank.expert_size,
        "expert_tensor_parallel_size": mp_rank.expert_tensor_size,
        "sequence_parallel": parallel.sequence_parallel,
    }


def _recompute_options(recompute: Recompute) -> dict[str, Any]:
    match recompute:
        case Recompute.none:
            return {}
        case Recompute.selective:
            # The attention kernels keep no scores, so that only the MLP is worth a second pass.
            return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
        case Recompute.full:
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }


def _kernel_options() -> dict[str, Any]:
    """Select the device of initialisation and Megatron's fused kernels."""
    on_gpu = device.has_cuda()
    return {
        "use_cpu_initialization": not on_gpu,
        "gradient_accumulation_fusion": True,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "masked_softmax_fusion": False,
        # The fused kernel ignores the attention factor of yarn.
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def _moe_options(moe: MoeShape | None) -> dict[str, Any]:
    if moe is None:
        return {}
    if moe.top_k == 1 and moe.norm_topk_prob:
        raise InputError(
            "num_experts_per_tok",
            1,
            "several, or norm_topk_prob=false: the router would get no gradient",
            "an edited config.json",
        )
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(sparse) for sparse in moe.moe_layer_pattern],
        "moe_router_topk": moe.top_k,
        # A softmax over the selected logits equals the renormalised softmax over all logits.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": device.has_transformer_engine(),
    }


def build_model_chunks(
    shape: ModelShape,
    groups: ParallelGroups,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    *,
    tree_attention: TreeAttention = TreeAttention.auto,
    image_processor: ImageProcessor | None = None,
    exact: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[GPTModelChunk]:
    """Build this rank's `parallel.virtual_pipeline` chunks on its device, without weights.

    The head is `shape.head`, which may differ from that of the checkpoint. A model that sees images
    needs the processor of its folder. Adapters are added by `lora.attach_adapters`. With `exact`
    the layers are those of `exact_layers`. `options` are those of `build_transformer_config`.
    """
    assert (shape.vision is None) == (image_processor is None), "a tower needs its processor"
    config = build_transformer_config(
        shape,
        groups,
        parallel,
        dtype,
        tree_attention=tree_attention,
        exact=exact,
        options=options,
    )
    chunks = [
        _build_model_chunk(shape, groups, config, chunk, exact=exact)
        for chunk in range(groups.coordinates.model_parallel_rank.virtual_size)
    ]
    for number, chunk in enumerate(chunks):
        chunk.vision, chunk.image_processor = None, image_processor
        if shape.vision is not None and groups.coordinates.model_parallel_rank.holds_embedding(
            number
        ):
            recompute = parallel.recompute is Recompute.full
            chunk.vision = build_vision_tower(shape.vision, dtype, recompute=recompute)
        set_grad_sync_flags(chunk, shape, sequence=config.sequence_parallel)
        if shape.moe is not None:
            install_replay(chunk, shape.moe.moe_layer_pattern, groups)
    return chunks


def _build_model_chunk(
    shape: ModelShape,
    groups: ParallelGroups,
    config: TransformerConfig,
    chunk: int,
    *,
    exact: bool,
) -> GPTModelChunk:
    mp_rank = groups.coordinates.model_parallel_rank
    model_groups = copy.copy(groups.pg_collection)
    # With the group Megatron would sum tied weights of two stages, to initialise them equally; here
    # both are loaded from the checkpoint.
    model_groups.embd = None
    model = GPTModelChunk(
        config=config,
        transformer_layer_spec=decoder_block_spec(shape, mp_rank, chunk, exact=exact),
        vocab_size=padded_vocab_size(shape, mp_rank.tensor_size),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=mp_rank.holds_embedding(chunk),
        post_process=mp_rank.holds_output_layer(chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings
        and shape.head is HeadKind.vocab,
        position_embedding_type="rope",
        pg_collection=model_groups,
        vp_stage=chunk,
    )
    rotary = PackedMultimodalRotaryEmbedding if shape.vision else PackedRotaryEmbedding
    model.rotary_pos_emb = rotary(shape.head_dim, shape.rope)
    if shape.head is HeadKind.scalar and mp_rank.holds_output_layer(chunk):
        model.output_layer = ScalarOutputLayer(shape.hidden_size, config.params_dtype)
    model.to(device.current_device())
    return model


def set_grad_sync_flags(model: torch.nn.Module, shape: ModelShape, *, sequence: bool) -> None:
    """Set the parameter attributes that tell Megatron how to reduce gradients and count norms.

        tensor_model_parallel   The parameter is sharded over the tensor group: the shards of all
                                ranks count in the gradient norm, else only tensor rank 0's copy.
        allreduce = False       The parameter belongs to an expert: it is replicated over the
                                expert-data group instead of the data group, and its tensor group is
                                that of the expert.
        sequence_parallel       The parameter is replicated over the tensor group, but each rank
                                applies it to its part of the tokens, so gradients are summed.
        average_gradients_across_tp_domain
                                The parameter belongs to the vision tower, of which each rank
                                computes the whole gradient. Attention on GPUs does not add up in a
                                fixed order, so that replicas would drift apart without a mean. On
                                CPUs the gradients are equal, and gloo has no mean.

    Megatron's layers set some of these attributes; norms, adapters, towers and heads of this
    package do not. Megatron recognises query and key norms by name and sums their gradients. A
    scalar head processes all tokens on every rank, so its gradient is complete.

    Args:
        model: The chunk whose parameters get the attributes.
        shape: Shape of the model.
        sequence: Whether sequence parallelism is on.
    """
    for name, parameter in model.named_parameters():
        is_expert = is_expert_param(name)
        is_replicated = is_tensor_replicated(shape, name) and (is_lora_param(name) or not is_expert)
        parameter.tensor_model_parallel = not is_replicated
        parameter.allreduce = not is_expert
        needs_sum = is_replicated and not (is_expert or name.endswith(_NO_TP_GRAD_SUM_SUFFIXES))
        parameter.sequence_parallel = sequence and needs_sum
        if is_vision_param(name) and not sequence and device.has_cuda():
            parameter.average_gradients_across_tp_domain = True


def wrap_with_ddp(
    chunks: Sequence[GPTModelChunk], groups: ParallelGroups, parallel: ParallelConfig
) -> list[DistributedDataParallel]:
    """Add float32 gradient buffers that are summed over data ranks after the last micro-batch.

    The reduction does not overlap with the backward pass: it could only overlap with the last
    of many micro-batches.
    """
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                use_distributed_optimizer=parallel.distributed_optimizer,
            ),
            module=chunk,
            pg_collection=groups.pg_collection,
        )
        for chunk in chunks
    ]


def make_vocab_shard(
    shape: ModelShape, groups: ParallelGroups, *, exact: bool = False
) -> VocabShard:
    """Return this rank's rows of the output layer; with `exact` for its exact kernel."""
    mp_rank = groups.coordinates.model_parallel_rank
    num_rows = padded_vocab_size(shape, mp_rank.tensor_size) // mp_rank.tensor_size
    first_row = mp_rank.tensor_rank * num_rows
    return VocabShard(
        first_token_id=first_row,
        num_valid_rows=max(0, min(num_rows, shape.vocab_size - first_row)),
        group=groups.pg_collection.tp if mp_rank.tensor_size > 1 else None,
        kernel=VocabKernel.exact if exact else VocabKernel.auto,
    )


def check_parameter_shapes(
    chunks: Sequence[torch.nn.Module], shards: Sequence[ShardLayout]
) -> None:
    """Assert that the chunks have exactly the parameters in `shards`, with their shapes."""
    expected = {shard.name: shard.shape for shard in shards}
    got = {
        f"chunk{number}.{name}" if len(chunks) > 1 else name: tuple(parameter.shape)
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    assert got == expected, f"model and mapping differ: {set(got.items()) ^ set(expected.items())}"


def release_moe_routing_graph(chunks: Sequence[torch.nn.Module]) -> None:
    """Drop the autograd graph of the last routing of tokens to experts.

    The graph holds Megatron's gradient hooks through C++, where Python's garbage collector does
    not see them, and so would keep the model and its process groups alive.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if dispatcher := getattr(module, "token_dispatcher", None):
                dispatcher.probs = None
