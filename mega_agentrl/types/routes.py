"""Routes: the experts that each layer of a mixture-of-experts model sent a token to.

The engine returns the routes of the tokens that it computed, and the policy replays them
(`actor.model.route_replay`), so that rounding does not send a token to other experts in training
than in sampling (arXiv 2510.11370). A digest of each token's routes travels with them from the
engine. The policy computes it again from the experts that its routers chose, so that routes of
another token, another layer or another model cannot go unnoticed.

Shape suffixes: N consecutive tokens of a sequence, L layers with experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

    import torch


DIGEST_BITS = 32
_LARGEST_DIGEST = 2**DIGEST_BITS - 1
_LAYER_STRIDE = 2**16
# Large odd numbers without a simple relation, as int64: 2^64 over the golden ratio, and the factors
# of Knuth's MMIX generator and of L'Ecuyer's table.
_MIX = -7046029254386353131
_PER_POSITION = 6364136223846793005
_PER_EXPERT = 2862933555777941757


@dataclass(slots=True, kw_only=True, frozen=True, eq=False)
class TokenRoutes:
    """Routes of the tokens [start, start + N) of a sequence."""

    expert_NLK: np.ndarray
    """[N, L, K] uint8 or uint16 experts; `unrouted` where the routes of a token are unknown."""
    digest_N: np.ndarray
    """[N] uint32 digest of each token's routes (`route_digests`), 0 where they are unknown."""
    start: int = 0
    """Position of the first token in its sequence."""

    def __post_init__(self) -> None:
        if self.expert_NLK.ndim != 3 or len(self.expert_NLK) != len(self.digest_N):
            expected = f"[N, layers, experts per token] for {len(self.digest_N)} digests"
            raise InputError("expert_NLK", self.expert_NLK.shape, expected)

    @classmethod
    def from_experts(
        cls, expert_NLK: np.ndarray, token_ids: Sequence[int], num_experts: int, start: int = 0
    ) -> Self:
        """Return the routes of consecutive tokens, with their digests.

        Args:
            expert_NLK: [N, L, K] experts of any integer dtype.
            token_ids: [N] ids of the tokens.
            num_experts: Experts of a layer.
            start: Position of the first token in its sequence.

        Raises:
            ValueError: A layer has no such expert, or there are other tokens than routes.
        """
        if len(token_ids) != len(expert_NLK):
            expected = f"{len(expert_NLK)}, one for each token with routes"
            cause = "routes of another request"
            raise InputError("number of token_ids", len(token_ids), expected, cause)
        if expert_NLK.size and not 0 <= expert_NLK.min() <= expert_NLK.max() < num_experts:
            got = (int(expert_NLK.min()), int(expert_NLK.max()))
            expected = f"experts from 0 to {num_experts - 1}"
            raise InputError("expert_NLK", got, expected, "an engine with another model")
        positions = np.arange(start, start + len(token_ids), dtype=np.int64)
        key_N = token_keys(positions, np.asarray(token_ids, dtype=np.int64))
        layer_L = np.arange(expert_NLK.shape[1], dtype=np.int64)
        digest_N = route_digests(key_N[:, None, None], layer_L[:, None], expert_NLK)
        return cls(
            expert_NLK=expert_NLK.astype(route_dtype(num_experts)),
            digest_N=(digest_N.sum(axis=(1, 2)) & _LARGEST_DIGEST).astype(np.uint32),
            start=start,
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.digest_N)

    @property
    def stop(self) -> int:
        """One past the position of the last token."""
        return self.start + self.num_tokens

    def take(self, index: slice | np.ndarray) -> Self:
        """Return the routes of some tokens, which need not be consecutive."""
        return type(self)(expert_NLK=self.expert_NLK[index], digest_N=self.digest_N[index])

    def before(self, stop: int) -> Self:
        """Return the routes of the tokens before a position of the sequence."""
        size = max(0, stop - self.start)
        return type(self)(
            expert_NLK=self.expert_NLK[:size], digest_N=self.digest_N[:size], start=self.start
        )

    def resized(self, num_tokens: int) -> Self:
        """Return routes of exactly `num_tokens` tokens; those of further ones are unknown."""
        missing = num_tokens - self.num_tokens
        if missing <= 0:
            return self.before(self.start + num_tokens)
        fill = unrouted(self.expert_NLK.dtype)
        return type(self)(
            expert_NLK=np.pad(
                self.expert_NLK, ((0, missing), (0, 0), (0, 0)), constant_values=fill
            ),
            digest_N=np.pad(self.digest_N, (0, missing)),
            start=self.start,
        )


@dataclass(slots=True, kw_only=True, frozen=True, eq=False)
class RecordedRoutes:
    """Routes that one rank of the policy chose in some of the layers, for N tokens in any order."""

    row_N: np.ndarray
    """[N] int64 number of a row of the batch that contains the token."""
    position_N: np.ndarray
    """[N] int64 position of the token in that row."""
    layers: tuple[int, ...]
    """Numbers of the layers among those with experts."""
    expert_NLK: np.ndarray
    """[N, L, K] uint16 experts in these layers."""
    digest_N: np.ndarray
    """[N] uint32 sums of the digests over these layers."""


def merge_recorded_routes(
    parts: Sequence[RecordedRoutes], row_lengths: Sequence[int], num_layers: int, num_experts: int
) -> tuple[TokenRoutes, ...]:
    """Return the routes of each row of a batch.

    Tokens that no rank has recorded for a row have unknown routes: the last token of a row, and
    those that are recorded for another row that shares them.

    Args:
        parts: What the ranks have recorded.
        row_lengths: Number of tokens of each row.
        num_layers: Layers with experts.
        num_experts: Experts of such a layer.
    """
    dtype = route_dtype(num_experts)
    start_B1 = np.cumsum([0, *row_lengths])
    top_k = parts[0].expert_NLK.shape[2]
    expert_MLK = np.full((start_B1[-1], num_layers, top_k), unrouted(dtype), dtype=dtype)
    digest_M = np.zeros(start_B1[-1], dtype=np.uint32)
    for part in parts:
        index_N = start_B1[part.row_N] + part.position_N
        expert_MLK[index_N[:, None], part.layers] = part.expert_NLK
        np.add.at(digest_M, index_N, part.digest_N)
    return tuple(
        TokenRoutes(expert_NLK=expert_MLK[start:stop], digest_N=digest_M[start:stop])
        for start, stop in pairwise(start_B1.tolist())
    )


def join_routes(parts: Sequence[TokenRoutes]) -> TokenRoutes:
    """Return the routes of consecutive parts of one sequence.

    Raises:
        ValueError: A part does not begin where the one before it ends.
    """
    for one, other in pairwise(parts):
        if one.stop != other.start:
            cause = "a request for the routes of only a part of its tokens"
            expected = f"{one.stop}, where the part before it ends"
            raise InputError("start of routes", other.start, expected, cause)
    return TokenRoutes(
        expert_NLK=np.concatenate([part.expert_NLK for part in parts]),
        digest_N=np.concatenate([part.digest_N for part in parts]),
        start=parts[0].start,
    )


def route_dtype(num_experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest dtype for experts and `unrouted`."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def unrouted(dtype: Any) -> int:
    """Return the value of an expert that is unknown, the largest of the dtype."""
    return int(np.iinfo(dtype).max)


def token_keys[ArrayT: ("np.ndarray[Any, Any]", "torch.Tensor")](
    position_N: ArrayT, token_N: ArrayT
) -> ArrayT:
    """Return [N] int64 numbers that identify tokens by position in their row and by id."""
    return _mix(position_N * _PER_POSITION + token_N)


def route_digests[ArrayT: ("np.ndarray[Any, Any]", "torch.Tensor")](
    key: ArrayT, layer: ArrayT | int, expert: ArrayT
) -> ArrayT:
    """Return the int64 digest, below 2^32, of each pair of a token and an expert.

    The digest of a token is the sum over its layers and experts, modulo 2^32, so that pipeline
    stages can compute their parts separately, and the order of experts does not matter.

    Args:
        key: `token_keys`; it is broadcast to the shape of `expert`.
        layer: int64 number of the layer among those with experts; broadcast likewise.
        expert: Experts.
    """
    expert = expert.astype(np.int64) if isinstance(expert, np.ndarray) else expert.long()
    digest: ArrayT = _mix(key + (layer * _LAYER_STRIDE + expert) * _PER_EXPERT) & _LARGEST_DIGEST
    return digest


def _mix[ArrayT: ("np.ndarray[Any, Any]", "torch.Tensor")](value: ArrayT) -> ArrayT:
    """Return a 32-bit hash of each int64 number, as int64; products wrap around."""
    value = value * _MIX
    # Without this, exchanging the experts of two tokens would not change the sum of their digests.
    value = value ^ (value >> DIGEST_BITS)
    mixed: ArrayT = (value * _MIX) >> DIGEST_BITS
    return mixed
