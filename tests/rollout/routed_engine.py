"""A scripted engine whose routes tell from which context a token was computed."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.types.routes import TokenRoutes

NUM_EXPERTS, NUM_LAYERS, TOP_K = 16, 3, 2


def route_after(tokens):
    """`[L, K]` experts of the last of these tokens, which depend on all of them."""
    digest = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=NUM_LAYERS * TOP_K).digest()
    return np.frombuffer(digest, np.uint8).reshape(NUM_LAYERS, TOP_K) % NUM_EXPERTS


def routes_of(tokens, start, stop):
    """The routes of the tokens [start, stop)."""
    experts = [route_after(tokens[: index + 1]) for index in range(start, stop)]
    expert_NLK = np.array(experts, dtype=np.int64).reshape(-1, NUM_LAYERS, TOP_K)
    return TokenRoutes.from_experts(expert_NLK, tokens[start:stop], NUM_EXPERTS, start)


class RoutedEngine:
    """Another scripted engine, which also returns the routes that are asked for."""

    def __init__(self, engine):
        self._engine = engine
        self.num_requests = 0
        self.num_routes = 0
        """Tokens whose routes were returned."""

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        self.num_requests += 1
        got = await self._engine.generate(request)
        if request.routes_start is None or not got.token_ids:
            return got
        tokens = (*request.token_ids, *got.token_ids)
        routes = routes_of(tokens, request.routes_start, len(tokens) - 1)
        self.num_routes += routes.num_tokens
        return replace(got, routes=routes)


def check_routes(trees):
    """Each row of the trees has the routes of its own tokens; returns how many have any."""
    batch = pack_trees(trees)
    assert batch.routes_B is not None
    packed = PackedRows.from_batch(batch)
    sequences = packed.sequences(range(packed.num_rows))
    stored = packed.row_routes(range(packed.num_rows))
    num_routed = 0
    for row, tokens_S, routes in zip(packed.row_R, sequences, stored, strict=True):
        own, tokens = batch.routes_B[row], tokens_S.tolist()
        size = 0 if own is None else own.num_tokens
        expected = routes_of(tokens, 0, len(tokens))
        if own is not None:
            assert own.start == 0
            assert np.array_equal(own.expert_NLK, expected.expert_NLK[:size])
            assert np.array_equal(own.digest_N, expected.digest_N[:size])
        # Rows that share a token may know its routes from one another.
        known = routes.digest_N > 0
        assert known[:size].all()
        assert np.array_equal(routes.expert_NLK[known], expected.expert_NLK[known])
        assert np.array_equal(routes.digest_N[known], expected.digest_N[known])
        num_routed += int(known.sum())
    return num_routed
