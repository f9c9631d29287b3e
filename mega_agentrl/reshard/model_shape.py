"""What a checkpoint's `config.json` says about the shape of the model.

Pure data: read once, passed to the name mapping, the actor and the estimates. Knows neither
torch nor transformers, so a login node can read it. One architecture is known, dense Qwen3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder; names follow Megatron where the two sides differ.

    num_kv_heads: key/value heads of grouped-query attention. ffn: inner width of the MLP.
    rope_base: theta of the rotary embedding. tied: output layer shares the embedding.
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
    rope_base: float
    max_positions: int
    tied: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; probable cause: a damaged config.json"
            )

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
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ValueError(
                f"model.path={path}: architecture {architecture} is not supported; supported: "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        _refuse_unknown(config, file)
        return _from_config(config, architecture, file)


def _refuse_unknown(config: dict[str, Any], file: Path) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key, got, expected in (
        ("attention_bias", config.get("attention_bias", False), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("use_sliding_window", config.get("use_sliding_window", False), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if got != expected:
            raise ValueError(
                f"{file}: {key}={got!r}, expected {expected!r}; other values have no mapping"
            )


def _from_config(config: dict[str, Any], architecture: str, file: Path) -> ModelShape:
    def need(key: str) -> Any:
        if key not in config:
            raise ValueError(f"{file}: key {key} is missing; probable cause: a damaged config.json")
        return config[key]

    rope = config.get("rope_parameters") or {}
    num_heads = int(need("num_attention_heads"))
    return ModelShape(
        architecture=architecture,
        num_layers=int(need("num_hidden_layers")),
        hidden=int(need("hidden_size")),
        num_heads=num_heads,
        num_kv_heads=int(need("num_key_value_heads")),
        head_dim=int(config.get("head_dim") or need("hidden_size") // num_heads),
        ffn=int(need("intermediate_size")),
        vocab=int(need("vocab_size")),
        norm_eps=float(need("rms_norm_eps")),
        rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        max_positions=int(need("max_position_embeddings")),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
