"""Routes and their digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.types.routes import (
    DIGEST_BITS,
    TokenRoutes,
    join_routes,
    route_digests,
    route_dtype,
    token_keys,
    unrouted,
)


def make_routes(num_tokens=6, num_layers=3, top_k=2, num_experts=8, start=0, seed=1):
    generator = np.random.default_rng(seed)
    expert_NLK = generator.integers(0, num_experts, (num_tokens, num_layers, top_k))
    tokens = generator.integers(0, 1000, num_tokens).tolist()
    return TokenRoutes.from_experts(expert_NLK, tokens, num_experts, start), expert_NLK, tokens


def total(routes):
    return int(routes.digest_N.sum(dtype=np.int64)) % 2**DIGEST_BITS


def test_a_digest_is_the_sum_over_layers_and_experts_in_numpy_and_torch():
    routes, expert_NLK, tokens = make_routes(start=5)
    key = token_keys(torch.arange(5, 11), torch.tensor(tokens))
    by_layer = [
        route_digests(key[:, None], layer, torch.from_numpy(expert_NLK[:, layer])).sum(1)
        for layer in range(3)
    ]
    digest_N = torch.stack(by_layer).sum(0) % 2**DIGEST_BITS
    assert digest_N.tolist() == routes.digest_N.tolist()
    assert len(set(routes.digest_N.tolist())) == 6


@pytest.mark.parametrize(
    "change",
    {
        "two tokens exchanged": lambda e, t: (e[[1, 0, 2, 3, 4, 5]], t, 0),
        "two layers exchanged": lambda e, t: (e[:, [1, 0, 2]], t, 0),
        "one expert": lambda e, t: ((e + np.eye(6, 3, dtype=int)[..., None]) % 8, t, 0),
        "another token": lambda e, t: (e, [*t[:-1], t[-1] + 1], 0),
        "other positions": lambda e, t: (e, t, 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_change_changes_the_sum_of_the_digests(change):
    routes, expert_NLK, tokens = make_routes()
    experts, ids, start = change[1](expert_NLK, tokens)
    assert total(TokenRoutes.from_experts(experts, ids, 8, start)) != total(routes)


def test_the_order_of_a_tokens_experts_does_not_matter():
    routes, expert_NLK, tokens = make_routes()
    assert total(TokenRoutes.from_experts(expert_NLK[..., ::-1], tokens, 8)) == total(routes)


def test_routes_are_cut_joined_and_padded():
    routes, expert_NLK, _ = make_routes(start=2)
    front, back = (
        routes.before(5),
        TokenRoutes(expert_NLK=routes.expert_NLK[3:], digest_N=routes.digest_N[3:], start=5),
    )
    joined = join_routes([front, back])
    assert (joined.start, joined.stop) == (2, 8)
    assert np.array_equal(joined.expert_NLK, expert_NLK)
    longer = routes.resized(8)
    assert np.array_equal(longer.digest_N[6:], [0, 0])
    assert (longer.expert_NLK[6:] == unrouted(np.uint8)).all()
    assert routes.resized(4).num_tokens == 4
    assert routes.before(0).num_tokens == 0
    late = TokenRoutes(expert_NLK=back.expert_NLK, digest_N=back.digest_N, start=6)
    with pytest.raises(InputError) as caught:
        join_routes([front, late])
    assert (caught.value.name, caught.value.got) == ("start of routes", 6)


def test_the_dtype_has_room_for_a_value_that_is_no_expert():
    assert (route_dtype(128), route_dtype(255), route_dtype(256)) == (
        np.uint8,
        np.uint8,
        np.uint16,
    )


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_that_no_layer_has_is_refused(expert):
    with pytest.raises(InputError) as caught:
        TokenRoutes.from_experts(np.full((1, 1, 1), expert), [3], 8)
    assert (caught.value.name, caught.value.got) == ("expert_NLK", (expert, expert))


def test_routes_of_other_tokens_are_refused():
    with pytest.raises(InputError) as caught:
        TokenRoutes.from_experts(np.zeros((3, 1, 1), dtype=int), [3, 4], 8)
    assert (caught.value.name, caught.value.got) == ("number of token_ids", 2)
