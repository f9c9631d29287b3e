"""What a checkpoint's `config.json` says about the shape of the model.

Pure data: read once, passed to the name mapping, the actor and the estimates. Knows neither
torch nor transformers, so a login node can read it. Every key that changes the maths is read,
or refused where nothing here could follow it; dropout counts as such a key.

Families differ in where biases stand and in the norm of queries and keys:

    Llama     biases on request: attention_bias on q, k, v and o, mlp_bias in the MLP
    Qwen2     q, k and v always have biases
    Qwen3     q and k are normalised; attention_bias as Llama's
    Qwen3Moe  the same, some or all MLPs split into experts
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mega_agentrl.reshard.rope_shape import RopeShape


class HeadKind(StrEnum):
    """What stands on the last hidden state: logits over the vocabulary, or one number."""

    vocab = "vocab"
    scalar = "scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model family fixes and what its config may choose.

    qkv_bias: always there. attention_bias, mlp_bias: read from the config. head_dim: of a config
    that names none (None: hidden size over heads). grouped: the number of key/value heads must
    be named (else it is that of heads). window_layers: a sliding window starts at
    max_window_layers (else it covers all layers). moe: has experts.
    """

    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    grouped: bool = True
    window_layers: bool = True
    moe: bool = False


FAMILIES = {
    "Llama": Family(attention_bias=True, mlp_bias=True, grouped=False),
    "Qwen2": Family(qkv_bias=True),
    "Qwen3": Family(attention_bias=True, qk_norm=True, head_dim=128),
    "Qwen3Moe": Family(attention_bias=True, qk_norm=True, window_layers=False, moe=True),
}
_CAUSAL, _SCALAR = "ForCausalLM", "ForSequenceClassification"
SUPPORTED_ARCHITECTURES = tuple(f"{family}{_CAUSAL}" for family in FAMILIES)
"""Policies and references."""
SCALAR_ARCHITECTURES = tuple(f"{name}{_SCALAR}" for name in FAMILIES if not FAMILIES[name].moe)
"""Reward models and critics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Experts of a model.

    top_k: experts per token. ffn: inner width of one expert. norm_topk: the weights of a
    token's experts are rescaled to sum to 1. sparse: for every layer, whether it has experts.
    """

    num_experts: int
    top_k: int
    ffn: int
    norm_topk: bool
    sparse: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; names follow Megatron where the two sides differ.

    num_kv_heads: key/value heads of grouped-query attention. ffn: inner width of the dense MLP.
    tied: the output layer shares the embedding (never with a scalar head). qkv_bias, out_bias,
    mlp_bias: biases of q/k/v, of o, of gate/up/down. qk_norm: queries and keys are normalised.
    """

    architecture: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    max_positions: int
    tied: bool
    rope: RopeShape
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeShape | None = None
    head: HeadKind = HeadKind.vocab

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads}: expected a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; probable cause: a damaged config.json"
            )
        if self.moe and len(self.moe.sparse) != self.num_layers:
            raise ValueError(
                f"moe.sparse has {len(self.moe.sparse)} entries: expected num_layers="
                f"{self.num_layers}; probable cause: the two were changed apart"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer (counted over the whole model) is split into experts."""
        return self.moe is not None and self.moe.sparse[layer]

    def with_scalar_head(self) -> ModelShape:
        """The same body under one number per token instead of logits."""
        family = self.architecture.removesuffix(_CAUSAL).removesuffix(_SCALAR)
        return replace(self, architecture=family + _SCALAR, head=HeadKind.scalar, tied=False)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelShape:
        """The shape of the Hugging Face checkpoint in a folder.

        Raises `ValueError` for a missing folder or config.json, an architecture that is not
        supported, a setting this mapping does not know, or a missing key.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(
                f"model.path={path}: expected a Hugging Face checkpoint folder with config.json; "
                f"{'it has none' if Path(path).is_dir() else 'there is no such folder'}"
            )
        config = json.loads(file.read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or ["none"])[0]
        known = SUPPORTED_ARCHITECTURES + SCALAR_ARCHITECTURES
        if architecture not in known:
            raise ValueError(
                f"model.path={path}: architecture {architecture} is not supported; supported: "
                f"{', '.join(known)}"
            )
        name, head = architecture.removesuffix(_CAUSAL), HeadKind.vocab
        if architecture in SCALAR_ARCHITECTURES:
            name, head = architecture.removesuffix(_SCALAR), HeadKind.scalar
        _refuse_unknown(config, FAMILIES[name], head, file)
        return _from_config(config, architecture, FAMILIES[name], head, file)


def _need(config: dict[str, Any], key: str, file: Path) -> Any:
    if config.get(key) is None:
        raise ValueError(f"{file}: key {key} is missing; probable cause: a damaged config.json")
    return config[key]


def _refuse_unknown(config: dict[str, Any], family: Family, head: HeadKind, file: Path) -> None:
    for key, got, expected in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("a sliding window in use", _slides(config, family), False),
        ("attention_dropout", config.get("attention_dropout", 0.0), 0.0),
        ("is_causal", config.get("is_causal", True), True),
        ("quantization_config", config.get("quantization_config"), None),
        ("num_labels", _num_labels(config) if head is HeadKind.scalar else 1, 1),
    ):
        if got != expected:
            raise ValueError(
                f"{file}: {key}={got!r}, expected {expected!r}; other values have no mapping"
            )


def _slides(config: dict[str, Any], family: Family) -> bool:
    kinds = config.get("layer_types")
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return False
    first = config.get("max_window_layers", 28) if family.window_layers else 0
    return bool(first < config.get("num_hidden_layers", 0))


def _num_labels(config: dict[str, Any]) -> int:
    # transformers leaves both keys out of a config with its default of two labels.
    labels = config.get("id2label")
    return len(labels) if labels is not None else int(config.get("num_labels") or 2)


def _from_config(
    config: dict[str, Any], architecture: str, family: Family, head: HeadKind, file: Path
) -> ModelShape:
    hidden, num_heads, num_layers = (
        int(_need(config, key, file))
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    max_positions = int(_need(config, "max_position_embeddings", file))
    attention_bias = family.attention_bias and bool(config.get("attention_bias"))
    if family.grouped and "num_key_value_heads" not in config:
        _need(config, "num_key_value_heads", file)
    head_dim = config.get("head_dim") or family.head_dim or hidden // num_heads
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(head_dim),
        ffn=int(_need(config, "intermediate_size", file)),
        vocab=int(_need(config, "vocab_size", file)),
        norm_eps=float(_need(config, "rms_norm_eps", file)),
        max_positions=max_positions,
        tied=head is HeadKind.vocab and bool(config.get("tie_word_embeddings", False)),
        rope=RopeShape.from_config(config, str(file)),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        moe=_moe(config, num_layers, file) if family.moe else None,
        head=head,
    )


def _moe(config: dict[str, Any], num_layers: int, file: Path) -> MoeShape | None:
    # Older configs say num_experts where newer ones say num_local_experts.
    count = config.get("num_local_experts", config.get("num_experts"))
    if count is None:
        _need(config, "num_experts", file)
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    sparse = tuple((n + 1) % step == 0 and n not in dense for n in range(num_layers))
    if not count or not any(sparse):
        return None
    return MoeShape(
        num_experts=int(count),
        top_k=int(_need(config, "num_experts_per_tok", file)),
        ffn=int(_need(config, "moe_intermediate_size", file)),
        norm_topk=bool(config.get("norm_topk_prob", False)),
        sparse=sparse,
    )
