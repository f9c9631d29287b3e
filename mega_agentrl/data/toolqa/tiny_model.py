"""Creates the tiny Qwen3 of the smoke run: random weights in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

HEAD_DIM = 32


def write_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int,
    hidden_size: int,
    seed: int,
) -> None:
    """Write config, weights, generation config, tokenizer and chat template.

    Raises:
        ValueError: `hidden_size` does not give an even number of heads.
    """
    num_heads, rest = divmod(hidden_size, HEAD_DIM)
    if rest or num_heads % 2:
        raise ValueError(
            f"hidden_size={hidden_size}: expected a multiple of {2 * HEAD_DIM}, because heads are "
            f"{HEAD_DIM} wide and two share a key-value head"
        )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=hidden_size**-0.5 / 2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
