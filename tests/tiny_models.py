"""Tiny random checkpoints of every supported architecture, written by transformers.

    folder = make_tiny_model("llama", tmp_path / "llama", tied=True, num_hidden_layers=2)

Four layers, hidden width 32, four heads over two key/value heads of width 16, an MLP of width
48, a vocabulary of 61 rows (so that padding is real), 128 positions, float32. Weights are
normal with standard deviation 0.3, biases too; norms lie around 1. Any key of the architecture's
config can be changed by name. `qwen3_moe` has four experts of width 16, two per token.

Rope: `llama` has Llama 3's scaling, `qwen2` yarn, the others none; with these numbers some
frequencies are unchanged, some scaled and some in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

# By name: the common prefix of the classes in transformers, and the differences from SIZES.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3", {"rope_parameters": DEFAULT_ROPE}),
    "qwen3_moe": ("Qwen3Moe", {"rope_parameters": DEFAULT_ROPE} | EXPERTS),
}
POLICIES = tuple(_FAMILIES)
REWARDS = ("llama_reward", "qwen2_reward", "qwen3_reward")


def make_tiny_model(
    name: str, folder: str | Path, *, tied: bool = False, seed: int = 7, **changes: Any
) -> Path:
    """Write the model `name`, one of `POLICIES` or `REWARDS`, and return its folder.

    `changes` override keys of the config, for example `head_dim=32`.
    """
    import transformers

    family = name.removesuffix("_reward")
    prefix, differs = _FAMILIES[family]
    head = {"num_labels": 1} if name in REWARDS else {"tie_word_embeddings": tied}
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | differs | head | changes))
    kind = "ForSequenceClassification" if name in REWARDS else "ForCausalLM"
    model = getattr(transformers, prefix + kind)(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise + (1.0 if "norm" in key else 0.0))
    model.save_pretrained(folder)
    return Path(folder)
