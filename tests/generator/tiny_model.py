"""A tiny random Qwen3 folder with a word-level tokenizer, and its recomputation in transformers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EOS_ID = 2
TOLERANCE = 1e-3


def write_model(folder: Path, *, seed: int = 0, scale: float = 1.0, **changes: int) -> Path:
    """Write model and tokenizer; `scale` above 1 makes the distribution less flat."""
    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the least that vLLM has a CPU kernel for
        "max_position_embeddings": 512,
    } | changes
    torch.manual_seed(seed)
    config = Qwen3Config(
        **shape, tie_word_embeddings=True, eos_token_id=EOS_ID, bos_token_id=None, pad_token_id=0
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return write_tokenizer(folder, shape["vocab_size"])


def write_moe_model(
    folder: Path, *, num_layers: int = 3, seed: int = 0, scale: float = 4.0
) -> Path:
    """Write a tiny Qwen3 with eight experts of which a token uses two, and its tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=num_layers,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return write_tokenizer(folder, config.vocab_size)


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """A token a word, `w5` and so on."""
    words = ["<pad>", "<unk>", "<eos>", "</python>", "</search>"]
    words += [f"w{index}" for index in range(len(words), vocab)]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


@cache
def _loaded(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits_of(folder: Path, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    """[T, V] float32 logits that predict each response token."""
    ids = torch.tensor([[*prompt, *response]])
    return _loaded(folder)(ids).logits[0, len(prompt) - 1 : -1].float()


@torch.no_grad()
def router_logits_of(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """[N, L, E] float32 logits of the routers of the L layers with experts."""
    output = _loaded(folder)(torch.tensor([list(token_ids)]), output_router_logits=True)
    return torch.stack(output.router_logits, dim=1).float()


def check_against_transformers(folder, request, got):
    """Log-probs, entropies and arg-max of every sampled token; returns the largest error."""
    temperature = request.temperature or 1.0
    logp_TV = (logits_of(folder, request.token_ids, got.token_ids) / temperature).log_softmax(-1)
    tokens = torch.tensor(got.token_ids)
    expected = logp_TV.gather(1, tokens[:, None])[:, 0]
    entropy = -(logp_TV.exp() * logp_TV).sum(-1)
    logp_error = (expected - torch.tensor(got.logps)).abs().max().item()
    entropy_error = (entropy - torch.tensor(got.entropies)).abs().max().item()
    top = logp_TV.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-4
    assert torch.equal(logp_TV.argmax(-1)[clear], torch.tensor(got.argmax_ids)[clear])
    assert logp_error < TOLERANCE
    assert entropy_error < TOLERANCE
    return max(logp_error, entropy_error)
