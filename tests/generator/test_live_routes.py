"""Routes that a live engine returns, compared with the routers of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator.engine_args import CPU_BLOCK_TOKENS
from mega_agentrl.types.records import FinishReason, GenerateRequest
from mega_agentrl.types.routes import TokenRoutes, join_routes
from tests.generator.engine_host import DEADLINE_S, EngineHost
from tests.generator.tiny_model import (
    check_against_transformers,
    router_logits_of,
    write_moe_model,
)

pytestmark = pytest.mark.slow(9)

NUM_EXPERTS, NUM_LAYERS, TOP_K = 8, 2, 2
CLEAR_MARGIN = 1e-3
"""Difference of router logits that rounding does not overcome."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_moe_model(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    config = EngineConfig(max_model_len=512, cpu_kv_cache_gib=1)
    log_path = tmp_path_factory.mktemp("engine") / "vllm.log"
    host = EngineHost(config, folder, log_path, return_routes=True)
    yield host
    host.close()


def make_request(name, token_ids, routes_start=0, max_tokens=20, **options):
    return GenerateRequest(
        request_id=name,
        token_ids=tuple(token_ids),
        max_tokens=max_tokens,
        seed=3,
        routes_start=routes_start,
        **options,
    )


def prompt(seed, length):
    return np.random.default_rng(seed).integers(5, 300, length).tolist()


def check_routes(folder, token_ids, routes):
    """Compare routes with the experts that transformers selects where that is clear."""
    assert routes.expert_NLK.shape[1:] == (NUM_LAYERS, TOP_K)
    logits_NLE = router_logits_of(folder, token_ids)[routes.start : routes.stop]
    top = logits_NLE.topk(TOP_K + 1).values
    clear_NL = (top[..., TOP_K - 1] - top[..., TOP_K] > CLEAR_MARGIN).numpy()
    expected_NLK = np.sort(logits_NLE.topk(TOP_K).indices.numpy())
    assert np.array_equal(np.sort(routes.expert_NLK)[clear_NL], expected_NLK[clear_NL])
    assert clear_NL.mean() > 0.9
    again = TokenRoutes.from_experts(
        routes.expert_NLK, token_ids[routes.start : routes.stop], NUM_EXPERTS, routes.start
    )
    assert np.array_equal(routes.digest_N, again.digest_N)


def test_the_routes_of_prompt_and_samples_are_those_of_transformers(engine, folder):
    requests = [make_request(f"many-{seed}", prompt(seed, 3 + 20 * seed)) for seed in range(8)]
    for request, got in zip(requests, engine.call("generate_many", requests), strict=True):
        check_against_transformers(folder, request, got)
        sequence = [*request.token_ids, *got.token_ids]
        assert (got.routes.start, got.routes.stop) == (0, len(sequence) - 1)
        check_routes(folder, sequence, got.routes)


def test_turns_return_the_routes_that_are_still_missing(engine, folder):
    first = make_request("turn-1", prompt(20, 70))
    answer = engine.call("generate", first)
    sequence = [*first.token_ids, *answer.token_ids, *prompt(21, 9)]
    second = make_request("turn-2", sequence, routes_start=answer.routes.stop)
    going_on = engine.call("generate", second)
    assert going_on.num_cached_tokens >= 2 * CPU_BLOCK_TOKENS
    whole = join_routes([answer.routes, going_on.routes])
    check_routes(folder, [*sequence, *going_on.token_ids], whole)


def test_routes_of_a_cached_prefix_are_returned_again(engine):
    tokens = prompt(30, 100)
    first = engine.call("generate", make_request("cold", tokens))
    again = engine.call("generate", make_request("warm", tokens))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 3 * CPU_BLOCK_TOKENS)
    assert again.token_ids == first.token_ids
    assert np.array_equal(again.routes.expert_NLK, first.routes.expert_NLK)


def test_no_routes_unless_they_are_asked_for(engine):
    assert engine.call("generate", make_request("none", prompt(40, 10), None)).routes is None


def test_an_aborted_request_has_the_routes_of_its_tokens(engine, folder):
    request = make_request("aborted", prompt(50, 40), max_tokens=400, temperature=1.0)
    future = engine.begin("generate", request)
    while engine.call("num_sampled") < 3:
        pass
    engine.call("abort", "aborted")
    got = future.result(DEADLINE_S)
    assert got.finish_reason is FinishReason.aborted
    sequence = [*request.token_ids, *got.token_ids]
    assert got.routes.stop == len(sequence) - 1
    check_routes(folder, sequence, got.routes)


def test_a_held_request_goes_on_and_keeps_its_routes(engine, folder):
    request = make_request("held", prompt(60, 40), max_tokens=200)
    future = engine.begin("generate", request)
    while engine.call("num_sampled") < 3:
        pass
    engine.call("pause", True)
    engine.call("resume")
    got = future.result(DEADLINE_S)
    sequence = [*request.token_ids, *got.token_ids]
    assert got.routes.stop == len(sequence) - 1
    check_routes(folder, sequence, got.routes)


def test_the_margin_leaves_most_routes_to_compare(folder):
    top = router_logits_of(folder, prompt(1, 100)).topk(TOP_K + 1).values
    assert float(torch.quantile(top[..., TOP_K - 1] - top[..., TOP_K], 0.1)) > CLEAR_MARGIN
