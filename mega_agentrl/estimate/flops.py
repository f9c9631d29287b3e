"""Floating-point operations that the model needs for a batch, and the share of the peak they are.

A multiplication of matrices [m, k] x [k, n] counts 2 m k n. Forward, per token of a layer:

    attention linears   2 h d (2 q + 2 kv)      q, kv: numbers of heads, d: their width
    dense MLP           2 * 3 h f
    experts             2 * 3 h f_e k + 2 h E   k of E experts run, and the router

and for a sequence of S tokens, each of which looks at itself and those before it,

    attention scores    2 * 2 q d * S (S + 1) / 2

The output layer counts 2 h V for each token that is scored; the embedding is a look-up and counts
nothing, as do norms, activations and rotations. A backward pass costs twice a forward pass. What
a run computes beyond that (padding, recomputation, masked halves of attention) is no use of the
model, and so is not counted: these are model FLOPs, as in PaLM's appendix B (Chowdhery et al.
2022), but for its attention, which counts the half that a causal model does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.model_shape import ModelShape

FORWARD_AND_BACKWARD = 3
"""Times the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Of one forward pass. linears: of the layers. scores: attention's two products of positions.
    output: of the output layer.
    """

    linears: float
    scores: float
    output: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.linears + self.scores + self.output


def forward_flops(shape: ModelShape, lengths: Sequence[int], num_scored: int) -> ForwardFlops:
    """Of sequences of so many tokens each; num_scored tokens go through the output layer."""
    num_tokens = sum(lengths)
    per_token = sum(layer_flops(shape, layer) for layer in range(shape.num_layers))
    seen = sum(length * (length + 1) // 2 for length in lengths)
    query = shape.num_heads * shape.head_dim
    return ForwardFlops(
        linears=float(num_tokens * per_token),
        scores=float(shape.num_layers * 4 * query * seen),
        output=float(2 * shape.hidden * shape.vocab * num_scored),
    )


def layer_flops(shape: ModelShape, layer: int) -> int:
    """Of the linears of one layer, per token and forward pass."""
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    attention = 2 * shape.hidden * shape.head_dim * heads
    if shape.moe is None or not shape.is_sparse(layer):
        return attention + 6 * shape.hidden * shape.ffn
    moe = shape.moe
    return attention + 6 * shape.hidden * moe.ffn * moe.top_k + 2 * shape.hidden * moe.num_experts


def train_flops(shape: ModelShape, lengths: Sequence[int], num_scored: int) -> float:
    """Of a forward and a backward pass; arguments as of `forward_flops`."""
    return FORWARD_AND_BACKWARD * forward_flops(shape, lengths, num_scored).total
