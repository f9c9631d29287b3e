"""Replay of routes: each layout sends each token where it was sent, and nothing else is accepted.

Recorded routes, some of them changed as noise in a router would, are replayed in every kind of
layout and compared with one process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.config.enums import Recompute
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.types.routes import TokenRoutes, merge_recorded_routes, unrouted
from tests.actor.circles import mark_extended
from tests.actor.model.route_jobs import reject_wrong_routes, replay
from tests.parallel.merge import assemble, relative_errors, scores_by_row
from tests.tiny_models import make_tiny_model
from tests.tree_batches import make_tree_batch

NUM_EXPERTS, NUM_LAYERS = 4, 4
NOISY_LAYER = 2
LAYOUTS = {
    "recompute the experts": {"recompute": Recompute.selective},
    "recompute all": {"recompute": Recompute.full},
    "EP2": {"data": 2, "expert": 2},
    "TP2-EP2-SP": {"tensor": 2, "expert": 2, "sequence_parallel": True},
    "CP2": {"context": 2},
    "PP2-V2-recompute": {"pipeline": 2, "virtual_pipeline": 2, "recompute": Recompute.selective},
    "TP2-PP2-SP-recompute": {
        "tensor": 2,
        "pipeline": 2,
        "sequence_parallel": True,
        "recompute": Recompute.full,
    },
}
CASES = mark_extended(LAYOUTS, quick=["recompute the experts", "TP2-EP2-SP", "PP2-V2-recompute"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def batch():
    batch = make_tree_batch()
    batch.mask_BT[0, 0] = True
    return batch


@pytest.fixture(scope="module")
def run(folder, rank_pool, train_config):
    """Return a function that runs a job on the ranks of a layout."""

    def run_on_ranks(job, *arguments, **layout):
        config = train_config(folder, **layout)
        config.optim.micro_batch_tokens = 40
        return rank_pool.run(job, config.parallel.world_size, config, *arguments)

    return run_on_ranks


def row_lengths(batch):
    prompts = [len(prompt) for prompt in batch.prompt_ids]
    return [sum(pair) for pair in zip(prompts, batch.length_B.tolist(), strict=True)]


def with_routes(batch, parts):
    """Return the batch with the routes that the ranks recorded."""
    routes_B = merge_recorded_routes(parts, row_lengths(batch), NUM_LAYERS, NUM_EXPERTS)
    return batch.with_fields(routes_B=routes_B)


@pytest.fixture(scope="module")
def noisy(batch, folder, rank_pool, train_config):
    """Return the batch with recorded routes, of which every third token's differ in one layer."""
    config = train_config(folder)
    flat = batch.with_fields(tree_order_B=None, shared_length_B=None)
    (rank,) = rank_pool.run(replay, 1, config, flat, flat)
    routes_B = []
    for row, routes in enumerate(with_routes(flat, rank.recorded).routes_B):
        tokens = [*batch.prompt_ids[row], *batch.response_BT[row].tolist()]
        num_inputs = max(1, routes.num_tokens - 1)
        expert_NLK = routes.expert_NLK[:num_inputs].astype(np.int64)
        expert_NLK[::3, NOISY_LAYER] = (expert_NLK[::3, NOISY_LAYER] + 1) % NUM_EXPERTS
        routes_B.append(TokenRoutes.from_experts(expert_NLK, tokens[:num_inputs], NUM_EXPERTS))
    return batch.with_fields(routes_B=tuple(routes_B))


@pytest.fixture(scope="module")
def single(batch, noisy, folder, rank_pool, train_config):
    """Return the results of one process, which computes each row by itself."""
    config = train_config(folder)
    config.batch.trees = False
    config.optim.micro_batch_tokens = 4096
    flat = {"tree_order_B": None, "shared_length_B": None}
    (rank,) = rank_pool.run(replay, 1, config, batch.with_fields(**flat), noisy.with_fields(**flat))
    return rank


@pytest.fixture(scope="module")
def ranks_of(run, batch, noisy):
    """Return `ranks_of(layout)`: the results of each rank of a layout."""
    return cache(lambda layout: run(replay, batch, noisy, **LAYOUTS[layout]))


@pytest.mark.parametrize("layout", CASES)
def test_a_layout_replays_the_routes(layout, folder, batch, noisy, single, ranks_of):
    ranks = ranks_of(layout)
    own, replayed = (
        scores_by_row([getattr(rank, name) for rank in ranks], batch)
        for name in ("own", "replayed")
    )
    expected = scores_by_row([single.replayed], batch)
    for got, value in zip(replayed, expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-6)
    # Noise in one router of four is seen in the log-probs, and replay removes it.
    assert float((own[0] - replayed[0]).abs().max()) > 0.1
    expected_BT = scores_by_row([single.own], batch)[0]
    torch.testing.assert_close(own[0], expected_BT, rtol=0, atol=1e-5)
    shapes = hf_shapes(ModelShape.from_folder(folder))
    gradient = assemble([rank.gradients for rank in ranks], shapes, atol=1e-5)
    whole = assemble([single.gradients], shapes, atol=1e-5)
    errors = relative_errors(gradient, whole)
    assert max(errors.values()) < 1e-4, {n: e for n, e in errors.items() if e >= 1e-4}
    for rank in ranks:
        assert rank.stats.metrics["routes_replayed"] == 1
        share = rank.stats.metrics["routes_differing"]
        assert share == pytest.approx(num_noisy(noisy), rel=0.3)


def num_noisy(noisy):
    """Return the share of pairs of token and layer with changed experts."""
    lengths = [routes.num_tokens for routes in noisy.routes_B]
    return sum(-(-length // 3) for length in lengths) / sum(lengths) / NUM_LAYERS


@pytest.mark.parametrize("layout", CASES)
def test_a_layout_records_its_routes(layout, batch, single, ranks_of):
    got = with_routes(batch, [part for rank in ranks_of(layout) for part in rank.recorded])
    expected = with_routes(batch, single.recorded)
    # Tokens that rows share are recorded for one of them, which is the one that stores them.
    stored, whole = (PackedRows.from_batch(each).routes for each in (got, expected))
    inputs_N = (whole.expert_NLK != unrouted(np.uint8)).all(axis=(1, 2))
    known_N = (stored.expert_NLK != unrouted(np.uint8)).all(axis=(1, 2))
    assert inputs_N.sum() > 20
    assert np.array_equal(known_N, inputs_N)
    assert np.array_equal(np.sort(stored.expert_NLK), np.sort(whole.expert_NLK))
    assert np.array_equal(stored.digest_N, whole.digest_N)


def test_wrong_routes_are_refused(run, noisy):
    first, *rest = noisy.routes_B
    other_layer = first.expert_NLK.copy()
    other_layer[:, [0, 1]] = other_layer[:, [1, 0]]
    one_expert = first.expert_NLK.copy()
    one_expert[3, 1, 0] = next(
        expert for expert in range(NUM_EXPERTS) if expert not in one_expert[3, 1]
    )
    shifted = replace(
        first,
        expert_NLK=np.roll(first.expert_NLK, 1, axis=0),
        digest_N=np.roll(first.digest_N, 1),
    )
    wrong = [
        replace(first, expert_NLK=other_layer),
        replace(first, expert_NLK=one_expert),
        shifted,
        first,
    ]
    batches = [noisy.with_fields(routes_B=(routes, *rest)) for routes in wrong]
    *errors, none = run(reject_wrong_routes, batches)[0]
    assert all("model.router_replay" in error and "digest" in error for error in errors)
    assert none == ""


def test_tokens_without_routes_use_those_of_the_policy(run, batch, single):
    routes = with_routes(
        batch.with_fields(tree_order_B=None, shared_length_B=None), single.recorded
    ).routes_B
    # The engine has the routes of one row only, and not of its end.
    partial = batch.with_fields(routes_B=(routes[0].before(6), *[None] * (len(routes) - 1)))
    (rank,) = run(replay, batch, partial)
    got, expected = (scores_by_row([each], batch)[0] for each in (rank.replayed, single.own))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert 0 < rank.stats.metrics["routes_replayed"] < 0.5
    assert rank.stats.metrics["routes_differing"] == 0
