"""Shape of a model, read from a checkpoint's `config.json`.

Every key that changes the computation is either read or checked: an unsupported value, such as
dropout, raises an error. The module needs neither torch nor transformers, so it can run on a login
node.

Families differ in their biases and in the norm of queries and keys:

    Llama     optional biases: attention_bias on q, k, v and o, mlp_bias in the MLP
    Qwen2     q, k and v always have biases
    Qwen3     q and k are normalized; attention_bias as in Llama
    Qwen3Moe  as Qwen3, with experts in some or all MLPs

Vision-language models are one of these with a vision tower (`vision_shape`): Qwen2_5_VL is a Qwen2,
Qwen3VL a Qwen3. transformers 5 nests the keys of the decoder in `text_config`; the published files
of Qwen2.5-VL have them at the top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import decoder_settings, read_json
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.rope_config import RopeConfig
from mega_agentrl.reshard.mapping.vision_shape import VisionShape, VisionTower


class HeadKind(StrEnum):
    """Output of the model: logits over the vocabulary, or one number per token."""

    vocab = "vocab"
    scalar = "scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Properties that a model family fixes, and options that its config may choose."""

    has_qkv_bias: bool = False
    """q, k and v always have biases."""
    reads_attention_bias: bool = False
    """The config may set `attention_bias`."""
    reads_mlp_bias: bool = False
    """The config may set `mlp_bias`."""
    has_qk_norm: bool = False
    """Queries and keys are normalized."""
    default_head_dim: int | None = None
    """Head dim of a config that has none; None for hidden size divided by heads."""
    requires_num_kv_heads: bool = True
    """The config must set `num_key_value_heads`; otherwise it defaults to the number of heads."""
    reads_max_window_layers: bool = True
    """A sliding window starts at layer `max_window_layers`; otherwise it covers all layers."""
    is_moe: bool = False
    """The family has experts."""
    vision_tower: VisionTower | None = None
    """Architecture of the vision tower; None for a text model."""
    hf_decoder_prefix: str = "model."
    """First part of the Hugging Face names of the decoder's tensors."""
    hf_vision_prefix: str = ""
    """First part of the Hugging Face names of the tower's tensors."""


FAMILIES = {
    "Llama": ModelFamily(
        reads_attention_bias=True, reads_mlp_bias=True, requires_num_kv_heads=False
    ),
    "Qwen2": ModelFamily(has_qkv_bias=True),
    "Qwen3": ModelFamily(reads_attention_bias=True, has_qk_norm=True, default_head_dim=128),
    "Qwen3Moe": ModelFamily(
        reads_attention_bias=True, has_qk_norm=True, reads_max_window_layers=False, is_moe=True
    ),
    "Qwen2_5_VL": ModelFamily(
        has_qkv_bias=True, vision_tower=VisionTower.qwen2_5_vl, hf_vision_prefix="visual."
    ),
    "Qwen3VL": ModelFamily(
        reads_attention_bias=True,
        has_qk_norm=True,
        default_head_dim=128,
        vision_tower=VisionTower.qwen3_vl,
        hf_decoder_prefix="model.language_model.",
        hf_vision_prefix="model.visual.",
    ),
}
_CAUSAL_LM_SUFFIX, _SEQUENCE_CLASSIFICATION_SUFFIX = "ForCausalLM", "ForSequenceClassification"
_VISION_SUFFIX = "ForConditionalGeneration"
SUPPORTED_ARCHITECTURES = tuple(
    f"{name}{_VISION_SUFFIX if family.vision_tower else _CAUSAL_LM_SUFFIX}"
    for name, family in FAMILIES.items()
)
"""Architectures of policies and references."""
SCALAR_ARCHITECTURES = tuple(
    f"{name}{_SEQUENCE_CLASSIFICATION_SUFFIX}"
    for name, family in FAMILIES.items()
    if not family.is_moe and not family.vision_tower
)
"""Architectures of reward models and critics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Experts of a model."""

    num_experts: int
    top_k: int
    """Experts per token."""
    ffn_hidden_size: int
    """Inner width of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are rescaled to sum to 1."""
    moe_layer_pattern: tuple[bool, ...]
    """One flag per layer: True if the layer has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; names follow Megatron where the two sides differ."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Key/value heads of grouped-query attention."""
    head_dim: int
    ffn_hidden_size: int
    """Inner width of the dense MLP."""
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    """Whether the output layer shares the embedding; never with a scalar head."""
    rope: RopeConfig
    qkv_bias: bool = False
    """Biases of q, k and v."""
    o_proj_bias: bool = False
    """Bias of o."""
    mlp_bias: bool = False
    """Biases of gate, up and down."""
    qk_norm: bool = False
    """Whether queries and keys are normalized."""
    moe: MoeShape | None = None
    head: HeadKind = HeadKind.vocab
    vision: VisionShape | None = None
    """The vision tower of a vision-language model."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            expected = f"a multiple of num_key_value_heads={self.num_kv_heads}"
            cause = "a damaged config.json"
            raise InputError("num_attention_heads", self.num_heads, expected, cause)
        if self.moe and len(self.moe.moe_layer_pattern) != self.num_layers:
            got, cause = len(self.moe.moe_layer_pattern), "only one of the two was changed"
            expected = f"num_layers={self.num_layers}"
            raise InputError("entries of moe.moe_layer_pattern", got, expected, cause)

    @property
    def family(self) -> ModelFamily:
        """The family of the architecture."""
        return FAMILIES[_family_name(self.architecture)]

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether the MLP of layer `layer` of the whole model consists of experts."""
        return self.moe is not None and self.moe.moe_layer_pattern[layer]

    def with_scalar_head(self) -> ModelShape:
        """Return the same model with a scalar head instead of logits.

        Raises:
            ValueError: It is a vision-language model.
        """
        if self.vision is not None:
            raise InputError(
                "architecture",
                self.architecture,
                "a text model for a critic or a reward model; a scalar head on a model that sees "
                "images is not supported",
                "algo.advantage=gae with a vision-language policy (grpo and rloo need no critic)",
            )
        return replace(
            self,
            architecture=_family_name(self.architecture) + _SEQUENCE_CLASSIFICATION_SUFFIX,
            head=HeadKind.scalar,
            tie_word_embeddings=False,
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelShape:
        """Read the shape of the Hugging Face checkpoint in a folder.

        Raises:
            ValueError: For a missing folder or config.json, an unsupported architecture or
                setting, or a missing key.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            cause = "it has none" if Path(path).is_dir() else "there is no such folder"
            expected = "a Hugging Face checkpoint folder with config.json"
            raise ConfigError("model.path", path, expected, cause)
        config = read_json(file, "model.path", "the config.json of a Hugging Face checkpoint")
        architecture = (config.get("architectures") or ["none"])[0]
        supported = SUPPORTED_ARCHITECTURES + SCALAR_ARCHITECTURES
        if architecture not in supported:
            expected = f"one of {', '.join(supported)}"
            raise InputError(f"model.path={path}, architecture", architecture, expected)
        family = FAMILIES[_family_name(architecture)]
        head = HeadKind.scalar if architecture in SCALAR_ARCHITECTURES else HeadKind.vocab
        if family.vision_tower:
            config = decoder_settings(config)
        _check_supported_settings(config, family, head, file)
        return _from_config(config, architecture, family, head, file)


def _family_name(architecture: str) -> str:
    for suffix in (_CAUSAL_LM_SUFFIX, _SEQUENCE_CLASSIFICATION_SUFFIX, _VISION_SUFFIX):
        architecture = architecture.removesuffix(suffix)
    return architecture


def _require_key(config: dict[str, Any], key: str, file: Path) -> Any:
    if config.get(key) is None:
        raise InputError(f"{file}, {key}", None, "a value", "a damaged config.json")
    return config[key]


def _check_supported_settings(
    config: dict[str, Any], family: ModelFamily, head: HeadKind, file: Path
) -> None:
    for key, got, expected in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("a sliding window in use", _uses_sliding_window(config, family), False),
        ("attention_dropout", config.get("attention_dropout", 0.0), 0.0),
        ("is_causal", config.get("is_causal", True), True),
        ("quantization_config", config.get("quantization_config"), None),
        ("num_labels", _num_labels(config) if head is HeadKind.scalar else 1, 1),
    ):
        if got != expected:
            raise InputError(
                f"{file}, {key}", got, f"{expected!r}", "a model for which there is no mapping"
            )


def _uses_sliding_window(config: dict[str, Any], family: ModelFamily) -> bool:
    layer_types = config.get("layer_types")
    if layer_types:
        return any(layer_type != "full_attention" for layer_type in layer_types)
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return False
    first = config.get("max_window_layers", 28) if family.reads_max_window_layers else 0
    return bool(first < config.get("num_hidden_layers", 0))


def _num_labels(config: dict[str, Any]) -> int:
    # transformers leaves both keys out of a config with its default of two labels.
    labels = config.get("id2label")
    return len(labels) if labels is not None else int(config.get("num_labels") or 2)


def _from_config(
    config: dict[str, Any], architecture: str, family: ModelFamily, head: HeadKind, file: Path
) -> ModelShape:
    hidden, num_heads, num_layers = (
        int(_require_key(config, key, file))
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    max_positions = int(_require_key(config, "max_position_embeddings", file))
    attention_bias = family.reads_attention_bias and bool(config.get("attention_bias"))
    if family.requires_num_kv_heads and "num_key_value_heads" not in config:
        _require_key(config, "num_key_value_heads", file)
    head_dim = int(config.get("head_dim") or family.default_head_dim or hidden // num_heads)
    if family.vision_tower is VisionTower.qwen2_5_vl and head_dim != hidden // num_heads:
        raise InputError(
            f"{file}, head_dim",
            head_dim,
            f"hidden_size / num_attention_heads = {hidden // num_heads}, as transformers' "
            "Qwen2.5-VL ignores any other value",
            "a config.json made by hand",
        )
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        ffn_hidden_size=int(_require_key(config, "intermediate_size", file)),
        vocab_size=int(_require_key(config, "vocab_size", file)),
        norm_eps=float(_require_key(config, "rms_norm_eps", file)),
        max_position_embeddings=max_positions,
        tie_word_embeddings=head is HeadKind.vocab
        and bool(config.get("tie_word_embeddings", False)),
        rope=_rope_from_config(config, family, head_dim, file),
        qkv_bias=family.has_qkv_bias or attention_bias,
        o_proj_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(config.get("mlp_bias")),
        qk_norm=family.has_qk_norm,
        moe=_moe_from_config(config, num_layers, file) if family.is_moe else None,
        head=head,
        vision=_vision_from_config(config, family, hidden, file),
    )


def _rope_from_config(
    config: dict[str, Any], family: ModelFamily, head_dim: int, file: Path
) -> RopeConfig:
    if family.vision_tower is None:
        return RopeConfig.from_config(config, str(file))
    return RopeConfig.from_vision_config(
        config,
        str(file),
        num_frequencies=head_dim // 2,
        interleaved=family.vision_tower is VisionTower.qwen3_vl,
    )


def _vision_from_config(
    config: dict[str, Any], family: ModelFamily, hidden: int, file: Path
) -> VisionShape | None:
    if family.vision_tower is None:
        return None
    settings = _require_key(config, "vision_config", file)
    return VisionShape.from_config(settings, family.vision_tower, hidden, str(file))


def _moe_from_config(config: dict[str, Any], num_layers: int, file: Path) -> MoeShape | None:
    # Older configs say num_experts where newer ones say num_local_experts.
    count = config.get("num_local_experts", config.get("num_experts"))
    if count is None:
        _require_key(config, "num_experts", file)
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    moe_layer_pattern = tuple((n + 1) % step == 0 and n not in dense for n in range(num_layers))
    if not count or not any(moe_layer_pattern):
        return None
    return MoeShape(
        num_experts=int(count),
        top_k=int(_require_key(config, "num_experts_per_tok", file)),
        ffn_hidden_size=int(_require_key(config, "moe_intermediate_size", file)),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        moe_layer_pattern=moe_layer_pattern,
    )
