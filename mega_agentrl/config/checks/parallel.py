"""Check parallel sizes against the model, and the layout of engines on the policy's GPUs.

Part of `check_config`. With `cluster.colocated`, each engine is on the GPUs of
`engine.tensor_parallel_size` consecutive policy ranks; no two engines share a GPU. Critic and
reward model always have their own GPUs. The preflight checks whether both sides fit into the GPU
memory.
"""

from __future__ import annotations

import os.path
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import Dtype, TreeAttention
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import decoder_settings, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
TRITON_HEAD_DIMS = (64, 128)
"""Widths of a head that the kernels of `model.tree_attention=triton` are tested with."""
_QWEN3_HEAD_DIM = 128  # of a config.json without head_dim
_OTHER_MODEL = "a size chosen for another model"


def read_model_config(folder: Path, key: str = "model.path") -> dict[str, Any]:
    """Read `config.json` of a supported Hugging Face checkpoint folder.

    The keys of the decoder of a vision-language model are at the top.
    """
    path = folder / "config.json"
    if not os.path.isfile(path):
        raise ConfigError(
            key,
            str(folder),
            "a local Hugging Face checkpoint folder",
            "there is no config.json in it, because it has not been downloaded or created yet "
            "(`make smoke` creates runs/toolqa/model), or the working folder is another",
        )
    model = read_json(path, key, "a folder with the config.json that transformers writes")
    got = model.get("architectures")
    if not isinstance(got, list) or not any(name in SUPPORTED_ARCHITECTURES for name in got):
        raise ConfigError(
            key,
            str(folder),
            f"a model with one of the architectures {', '.join(SUPPORTED_ARCHITECTURES)}",
            f"another model family, architectures={got}",
        )
    return decoder_settings(model)


def read_model_size(config: TrainConfig, model: dict[str, Any], name: str) -> int:
    """Return a positive number of the model's `config.json`."""
    value = model.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            "model.path",
            config.model.path,
            f"a config.json with a positive number as {name}",
            f"an incomplete config.json, which has {name}={value}",
        )
    return value


def has_experts(model: dict[str, Any]) -> bool:
    """Whether `config.json` describes a mixture of experts."""
    return any("Moe" in name for name in model["architectures"])


def has_images(model: Mapping[str, Any]) -> bool:
    """Whether `config.json` describes a vision-language model."""
    return model.get("vision_config") is not None


def check_parallel_sizes(config: TrainConfig, model: dict[str, Any]) -> None:
    """Raise a `ConfigError` for the first parallel size that the model cannot be split into."""
    heads = read_model_size(config, model, "num_attention_heads")
    layers = read_model_size(config, model, "num_hidden_layers")
    parallel, engine = config.parallel, config.engine
    # Older Llama configs omit the key if every head has its own key and value.
    kv_heads = heads
    if model.get("num_key_value_heads") is not None:
        kv_heads = read_model_size(config, model, "num_key_value_heads")
    for key, size in (
        ("parallel.tensor", parallel.tensor),
        ("engine.tensor_parallel_size", engine.tensor_parallel_size),
    ):
        _check_divides(key, size, "attention heads", heads)
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                key,
                size,
                f"a size that divides the model's {kv_heads} key/value heads or that they divide",
                _OTHER_MODEL,
            )
        if _has_dense_layers(model):
            feed_forward = read_model_size(config, model, "intermediate_size")
            _check_divides(key, size, "feed-forward channels", feed_forward)
    stages = parallel.pipeline * parallel.virtual_pipeline
    key = (
        "parallel.pipeline"
        if parallel.virtual_pipeline == 1
        else "parallel.pipeline * parallel.virtual_pipeline"
    )
    check_stages(key, stages, layers)
    _check_deepstack_layers(key, stages, layers, model)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            "parallel.virtual_pipeline",
            parallel.virtual_pipeline,
            "1 with parallel.pipeline=1",
            "only the pipeline was removed",
        )
    if parallel.sequence_parallel and parallel.tensor == 1:
        raise ConfigError(
            "parallel.sequence_parallel",
            True,
            "False with parallel.tensor=1, where no rank can share a sequence",
            "only the tensor ranks were removed",
        )
    _check_expert_parallel(config, model)
    _check_engine_tower(config, model)


def check_tree_attention(config: TrainConfig, model: dict[str, Any]) -> None:
    """Raise a `ConfigError` if `model.tree_attention=triton` cannot compute the model.

    Whether the GPUs are new enough is checked on them, when the policy starts.
    """
    if config.model.tree_attention is not TreeAttention.triton:
        return
    head_dim = _head_dim(config, model)
    expected = ""
    if head_dim not in TRITON_HEAD_DIMS:
        sizes = " or ".join(map(str, TRITON_HEAD_DIMS))
        expected = f"gather for a model with heads of {head_dim}, triton for heads of {sizes}"
    elif config.model.dtype is Dtype.float32:
        expected = "gather with model.dtype=float32, triton with bfloat16"
    if expected:
        raise ConfigError(
            "model.tree_attention",
            str(config.model.tree_attention),
            expected,
            "a setting chosen for another model or dtype",
        )


def check_zero_mismatch(config: TrainConfig, model: dict[str, Any]) -> None:
    """Raise a `ConfigError` if policy and engines cannot have equal log-probs bit by bit.

    That they run on CPUs is checked when the policy starts.
    """
    if not config.model.zero_mismatch:
        return
    refusals = {
        "a model without experts, whose sums follow their routes": has_experts(model),
        "a text model; a vision tower is computed in other arithmetic": has_images(model),
        "model.dtype=auto or float32": config.model.dtype is Dtype.bfloat16,
        "rollout.max_staleness=0, because older weights give other log-probs": (
            config.rollout.max_staleness > 0
        ),
    }
    for expected, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(
                "model.zero_mismatch", True, f"False, or {expected}", "the settings of another run"
            )


def check_lora(config: TrainConfig, model: dict[str, Any]) -> None:
    """Raise a `ConfigError` if the model or the layout cannot have adapters."""
    lora, parallel = config.model.lora, config.parallel
    if not lora.rank:
        return
    kv_heads = read_model_size(config, model, "num_key_value_heads")
    if parallel.tensor > kv_heads:
        raise ConfigError(
            "parallel.tensor",
            parallel.tensor,
            f"at most {kv_heads}, the model's key/value heads, with model.lora.rank={lora.rank}",
            "the layout of a run that trains all weights",
        )
    if parallel.tensor % parallel.expert_tensor_size:
        raise ConfigError(
            "parallel.expert_tensor",
            parallel.expert_tensor_size,
            f"a divisor of parallel.tensor={parallel.tensor} with model.lora.rank={lora.rank}",
            "the layout of a run that trains all weights",
        )
    if config.model.reference_path:
        raise ConfigError(
            "model.reference_path",
            config.model.reference_path,
            f"none with model.lora.rank={lora.rank}, where the reference shares the weights of the "
            "policy below the adapters",
            "the settings of a run that trains all weights",
        )


def _head_dim(config: TrainConfig, model: dict[str, Any]) -> int:
    if model.get("head_dim") is not None:
        return read_model_size(config, model, "head_dim")
    if any(name.startswith("Qwen3") for name in model["architectures"]):
        return _QWEN3_HEAD_DIM
    heads = read_model_size(config, model, "num_attention_heads")
    return read_model_size(config, model, "hidden_size") // heads


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each pipeline stage, virtual stages included, in the model's order.

    All stages have equally many layers. Where that is impossible, the first and the last have one
    fewer, as if the embedding and the output layer were layers, too: 94 layers make 8 stages of 11,
    six times 12, and 11 layers. The result is empty if that is impossible as well.
    """
    if num_layers % num_stages == 0:
        size, num_missing = num_layers // num_stages, 0
    elif (num_layers + 2) % num_stages == 0 and num_layers >= num_stages:
        size, num_missing = (num_layers + 2) // num_stages, 1
    else:
        return []
    starts = [max(0, stage * size - num_missing) for stage in range(num_stages)]
    return [range(*ends) for ends in pairwise([*starts, num_layers])]


def check_stages(key: str, stages: int, layers: int) -> None:
    """Raise a `ConfigError` unless the layers can be split into the stages."""
    if not split_layers(layers, stages):
        fits = [n for n in range(1, layers + 1) if split_layers(layers, n)]
        shown = ", ".join(map(str, fits[:12]))
        expected = f"a number of stages for the model's {layers} layers ({shown})"
        raise ConfigError(key, stages, expected, _OTHER_MODEL)


def _check_deepstack_layers(key: str, stages: int, layers: int, model: dict[str, Any]) -> None:
    """Check that the first stage has all layers after which features of images are added."""
    vision = model.get("vision_config") or {}
    num_features = len(vision.get("deepstack_visual_indexes") or ())
    if stages > 1 and len(split_layers(layers, stages)[0]) < num_features:
        raise ConfigError(
            key,
            stages,
            f"at most {layers // num_features} stages of the model's {layers} layers, so that the "
            f"first has the {num_features} layers after which features of images are added",
            "a layout of a text model",
        )


def _check_engine_tower(config: TrainConfig, model: dict[str, Any]) -> None:
    """Check that engines can split the vision tower; the policy replicates it on tensor ranks."""
    vision = model.get("vision_config") or {}
    size = config.engine.tensor_parallel_size
    for name, what in (("num_heads", "heads"), ("intermediate_size", "feed-forward channels")):
        if vision.get(name):
            what = f"{what} of the vision tower"
            _check_divides("engine.tensor_parallel_size", size, what, int(vision[name]))


def _check_expert_parallel(config: TrainConfig, model: dict[str, Any]) -> None:
    parallel, expert = config.parallel, config.parallel.expert
    if not has_experts(model):
        if expert > 1:
            raise ConfigError(
                "parallel.expert", expert, "1, the model has no experts", _OTHER_MODEL
            )
        return
    # Newer configs have num_local_experts, older ones num_experts.
    key = "num_local_experts" if "num_local_experts" in model else "num_experts"
    width = read_model_size(config, model, "moe_intermediate_size")
    _check_divides("parallel.expert", expert, "experts", read_model_size(config, model, key))
    share = parallel.expert_tensor_size
    for name, size in (
        ("parallel.expert_tensor", share),
        ("engine.tensor_parallel_size", config.engine.tensor_parallel_size),
    ):
        _check_divides(name, size, "channels in an expert", width)
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (expert * share):
        raise ConfigError(
            "parallel.expert",
            expert,
            f"a divisor of {ranks} = parallel.tensor={parallel.tensor} * "
            f"parallel.context={parallel.context} * parallel.data={parallel.data} when multiplied "
            f"by parallel.expert_tensor={share}, which makes {expert * share} ranks",
            "expert parallelism was counted as additional ranks",
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel",
            False,
            f"True with parallel.tensor={parallel.tensor} and experts, whose tokens must be split",
            "a layout of a dense model",
        )


def _has_dense_layers(model: dict[str, Any]) -> bool:
    dense = model.get("mlp_only_layers") or (model.get("decoder_sparse_step") or 1) > 1
    return bool(dense) or not has_experts(model)


def _check_divides(key: str, size: int, what: str, total: int) -> None:
    if total % size:
        fits = [n for n in range(1, total + 1) if total % n == 0]
        shown = ", ".join(map(str, fits[:12]))
        raise ConfigError(
            key, size, f"a divisor of the model's {total} {what} ({shown})", _OTHER_MODEL
        )


def check_colocation(config: TrainConfig) -> None:
    """Raise a `ConfigError` if others cannot share the policy's GPUs as `config` says."""
    if config.cluster.colocated_models and not config.auxiliary_models:
        raise ConfigError(
            "cluster.colocated_models",
            True,
            "False in a run without a critic and without a reward model in a folder",
            "settings for algo.advantage=gae",
        )
    if not config.cluster.colocated:
        return
    if config.rollout.max_staleness:
        raise ConfigError(
            "rollout.max_staleness",
            config.rollout.max_staleness,
            "0 with cluster.colocated=true, where sampling and training share the GPUs",
            "settings for engines on separate GPUs",
        )
    ranks, tensor = config.parallel.world_size, config.engine.tensor_parallel_size
    needed = config.cluster.num_engines * tensor
    if ranks % needed:
        raise ConfigError(
            "cluster.num_engines",
            config.cluster.num_engines,
            f"a number of engines whose {needed} ranks (engine.tensor_parallel_size={tensor}) are "
            f"a divisor of the policy's {ranks}, whose GPUs they share with cluster.colocated=true",
            "a number of engines for separate GPUs",
        )


def min_ranks_per_node(config: TrainConfig) -> int:
    """Number of consecutive policy ranks that must be on one machine.

    Tensor-parallel groups and colocated engines do not span machines.
    """
    tensor = config.parallel.tensor
    return lcm(tensor, config.engine.tensor_parallel_size) if config.cluster.colocated else tensor
