"""Counts the model FLOPs of a batch, and lists the peak FLOP/s of GPUs.

A matrix product [m, k] x [k, n] counts 2 m k n. The forward pass of a layer costs, per token, with
hidden size h, q query heads and kv key heads of width d, inner width f of the MLP and f_e of an
expert,

    attention linears   2 h d (2 q + 2 kv)
    dense MLP           2 * 3 h f
    experts             2 * 3 h f_e k + 2 h E   k of E experts, and the router

and for a sequence of S tokens with causal attention

    attention scores    2 * 2 q d * S (S + 1) / 2

The output layer costs 2 h V for each scored token, V being the size of the vocabulary. A backward
pass costs twice as much as a forward pass.
Embedding, norms, activations, rotary embeddings, vision towers, padding and recomputation are not
counted. These
are model FLOPs as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), except that PaLM
also counts the masked half of the attention.

The peaks are those of dense bfloat16 in NVIDIA's data sheets (which list twice as much with
sparsity): A100 SXM and PCIe 312 TFLOP/s; H100 SXM 989, PCIe 756, NVL 835; H200 SXM 989, NVL 836;
B200 HGX 2250. Runs on other GPUs report no MFU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.mapping.model_shape import ModelShape

FORWARD_BACKWARD_FACTOR = 3
"""FLOPs of a forward and a backward pass, in units of the forward pass."""
_TERA = 1e12
_PEAK_FLOPS = (
    (re.compile(r"\bB200\b"), 2250 * _TERA),
    (re.compile(r"\bH200 NVL\b"), 836 * _TERA),
    (re.compile(r"\bH200\b"), 989 * _TERA),
    (re.compile(r"\bH100 NVL\b"), 835 * _TERA),
    (re.compile(r"\bH100 PCIe\b"), 756 * _TERA),
    (re.compile(r"\bH100\b"), 989 * _TERA),
    (re.compile(r"\bA100\b"), 312 * _TERA),
)
"""Patterns of GPU names with their peak FLOP/s; the first match counts."""

_MIG_SLICE = re.compile(r"\bMIG\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """FLOPs of one forward pass."""

    linears: float
    """FLOPs of the linear layers of all transformer layers, the router included."""
    attention_scores: float
    """FLOPs of the two attention products over positions."""
    output_layer: float
    """FLOPs of the output layer."""

    @property
    def total(self) -> float:
        """FLOPs of the whole forward pass."""
        return self.linears + self.attention_scores + self.output_layer


def forward_flops(
    shape: ModelShape,
    lengths: Sequence[int],
    num_scored: int,
    shared_lengths: Sequence[int] | None = None,
) -> ForwardFlops:
    """Return the FLOPs of a forward pass.

    Args:
        shape: The model.
        lengths: Number of tokens of each sequence.
        num_scored: Number of tokens that go through the output layer.
        shared_lengths: Number of leading tokens that each sequence shares with the sequence before
            it, which are computed once; None if the sequences share nothing.
    """
    shared = [0] * len(lengths) if shared_lengths is None else shared_lengths
    num_tokens = sum(lengths) - sum(shared)
    per_token = sum(layer_flops_per_token(shape, layer) for layer in range(shape.num_layers))
    num_pairs = sum(map(_num_causal_pairs, lengths)) - sum(map(_num_causal_pairs, shared))
    query = shape.num_heads * shape.head_dim
    return ForwardFlops(
        linears=float(num_tokens * per_token),
        attention_scores=float(shape.num_layers * 4 * query * num_pairs),
        output_layer=float(2 * shape.hidden_size * shape.vocab_size * num_scored),
    )


def layer_flops_per_token(shape: ModelShape, layer: int) -> int:
    """Return the FLOPs of one layer's linears for one token in the forward pass."""
    num_heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    attention = 2 * shape.hidden_size * shape.head_dim * num_heads
    if shape.moe is None or not shape.is_moe_layer(layer):
        return attention + 6 * shape.hidden_size * shape.ffn_hidden_size
    moe = shape.moe
    return (
        attention
        + 6 * shape.hidden_size * moe.ffn_hidden_size * moe.top_k
        + 2 * shape.hidden_size * moe.num_experts
    )


def train_flops(
    shape: ModelShape,
    lengths: Sequence[int],
    num_scored: int,
    shared_lengths: Sequence[int] | None = None,
) -> float:
    """Return the FLOPs of a forward and a backward pass; arguments as in `forward_flops`."""
    forward = forward_flops(shape, lengths, num_scored, shared_lengths)
    return FORWARD_BACKWARD_FACTOR * forward.total


def pairs_per_token(shape: ModelShape) -> float:
    """Return how many attention scores cost as many FLOPs as all linears for one token."""
    token = forward_flops(shape, [1], num_scored=1)
    return (token.linears + token.output_layer) / token.attention_scores


def peak_flops(gpu_name: str) -> float | None:
    """Return the peak FLOP/s of a GPU, or None if unknown, as for a MIG slice.

    Args:
        gpu_name: Name that CUDA and NVML report, such as ``NVIDIA H100 80GB HBM3``.
    """
    if _MIG_SLICE.search(gpu_name):
        return None
    return next((peak for name, peak in _PEAK_FLOPS if name.search(gpu_name)), None)


def _num_causal_pairs(length: int) -> int:
    """Return the number of causal attention scores of a sequence."""
    return length * (length + 1) // 2
