"""Check the values that reach Megatron-core and vLLM as they are.

Part of `check_config`. An entry must be a field of the library's class, with a value of its type
(`config.library_fields`), and none that this project sets: `tests/actor/model/test_gpt_model.py`,
`tests/actor/training/test_optimizer.py` and `tests/generator/test_engine_args.py` compare the
tables here with what is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.library_fields import check_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOptions:
    """A setting whose entries are arguments of a library's class."""

    key: str
    """Dotted key of the setting."""
    source: str
    """The class, as `package.module:Class`."""
    settings: Mapping[str, str]
    """Fields that a setting of this project sets, separated by spaces, by setting."""
    reasons: Mapping[str, str]
    """Other fields that are not the user's, separated by spaces, by the reason."""

    @property
    def owners(self) -> dict[str, str]:
        """Expected values in errors, by name of the fields that are not the user's."""
        return {
            name: f"{setting} in its place, which sets it"
            for setting, names in self.settings.items()
            for name in names.split()
        } | {
            name: f"no value, because {reason}"
            for reason, names in self.reasons.items()
            for name in names.split()
        }

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` for the first entry that cannot be passed on."""
        owners = self.owners
        for name, value in options.items():
            if name in owners:
                raise ConfigError(f"{self.key}.{name}", value, owners[name])
        if options:  # the source is not parsed for nothing
            check_fields(options, self.key, self.source)


MEGATRON = LibraryOptions(
    key="model.megatron",
    source="megatron.core.transformer.transformer_config:TransformerConfig",
    settings={
        "model.path": "num_layers hidden_size num_attention_heads num_query_groups kv_channels "
        "ffn_hidden_size normalization layernorm_epsilon qk_layernorm gated_linear_unit "
        "activation_func add_bias_linear add_qkv_bias num_moe_experts moe_ffn_hidden_size "
        "moe_layer_freq moe_router_topk moe_router_pre_softmax moe_router_score_function",
        "model.dtype": "params_dtype pipeline_dtype bf16 fp16",
        "model.router_replay": "moe_enable_routing_replay",
        "parallel.tensor": "tensor_model_parallel_size",
        "parallel.pipeline": "pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "parallel.context": "context_parallel_size",
        "parallel.expert": "expert_model_parallel_size",
        "parallel.expert_tensor": "expert_tensor_parallel_size",
        "parallel.sequence_parallel": "sequence_parallel",
        "parallel.recompute": "recompute_granularity recompute_method recompute_num_layers "
        "recompute_modules",
    },
    reasons={
        "the policy has to compute what the engines sample from": "hidden_dropout "
        "attention_dropout moe_router_dtype moe_router_load_balancing_type",
        "the weights come from the checkpoint": "perform_initialization use_cpu_initialization",
        "micro-batches are packed and differ in length": "variable_seq_lengths "
        "calculate_per_token_loss",
        "the device and the model decide on the kernel": "gradient_accumulation_fusion "
        "bias_activation_fusion bias_dropout_fusion masked_softmax_fusion apply_rope_fusion "
        "persist_layer_norm moe_grouped_gemm",
    },
)
OPTIMIZER = LibraryOptions(
    key="optim.megatron",
    source="megatron.core.optimizer.optimizer_config:OptimizerConfig",
    settings={
        "optim.lr": "lr decoupled_lr decoupled_min_lr",
        "optim.min_lr": "min_lr",
        "optim.weight_decay": "weight_decay",
        "optim.betas": "adam_beta1 adam_beta2",
        "optim.grad_clip": "clip_grad",
        "model.dtype": "params_dtype bf16 fp16",
        "parallel.distributed_optimizer": "use_distributed_optimizer",
    },
    reasons={
        "norm, checkpoints and offloading read the float32 state of Adam": "optimizer "
        "use_precision_aware_optimizer use_layer_wise_distributed_optimizer optimizer_cpu_offload",
        "a step is taken without Megatron's own norm": "grad_norm_skip_threshold "
        "log_num_zeros_in_grad",
    },
)
VLLM = LibraryOptions(
    key="engine.vllm",
    source="vllm.engine.arg_utils:AsyncEngineArgs",
    settings={
        "model.path": "model",
        "model.dtype": "dtype",
        "model.router_replay": "enable_return_routed_experts",
        "seed": "seed",
        "deterministic": "enable_prefix_caching",
        "engine.tensor_parallel_size": "tensor_parallel_size",
        "engine.max_model_len": "max_model_len max_num_batched_tokens",
        "engine.max_num_seqs": "max_num_seqs",
        "engine.gpu_memory_utilization": "gpu_memory_utilization",
        "engine.enforce_eager": "enforce_eager",
        "cluster.num_engines": "data_parallel_size pipeline_parallel_size "
        "prefill_context_parallel_size nnodes",
        "cluster.colocated": "enable_sleep_mode",
    },
    reasons={
        "the policy sends the weights": "load_format model_weights weight_transfer_config",
        "log-probs and entropies are read from float32 logits": "hf_overrides",
        "the engine calls its workers": "distributed_executor_backend worker_extension_cls",
        "engines on CPUs need whole prompts": "enable_chunked_prefill",
        "images come as patches": "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb "
        "mm_device_do_normalize skip_mm_profiling",
    },
)


def check_library_options(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first entry that Megatron-core or vLLM cannot be given."""
    MEGATRON.check(config.model.megatron)
    OPTIMIZER.check(config.optim.megatron)
    VLLM.check(config.engine.vllm)
