"""A live engine: what it generates, compared with transformers; updates of its weights from trainer
processes, and failed updates, after which it does not serve.

One file, so that one process starts one engine for all of it. Two tensor ranks, faults of every
kind, wrong names and comparison bit for bit are in `tests/e2e`. Tests are quick or slow, none is
`extended`, which would start another engine in `make test-extended`.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.errors import InputError
from mega_agentrl.generator.engine_args import CPU_BLOCK_TOKENS
from mega_agentrl.generator.weights.loader_trace import trace_engine_layouts
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.context import make_rollout_context
from mega_agentrl.rollout.generation.interruptible import InterruptibleGenerator
from mega_agentrl.types.errors import EngineRefusalError
from mega_agentrl.types.records import FinishReason, GenerateRequest
from tests.fakes import FakeRubric, FakeTools, make_prompt
from tests.generator.engine_host import DEADLINE_S
from tests.generator.live_transfer import LiveTransfer
from tests.generator.tiny_model import EOS_ID, check_against_transformers, logits_of, write_model
from tests.reshard.fake_trainer import FakeTrainer
from tests.reshard.faults import Fault

pytestmark = pytest.mark.usefixtures("inspect_models_in_process")

# --- Generation ---


def make_requests(name, count, **settings):
    rng = random.Random(name)
    return [
        GenerateRequest(
            request_id=f"{name}/{index}",
            token_ids=tuple(rng.randrange(5, 300) for _ in range(rng.randrange(3, 40))),
            **({"max_tokens": rng.randrange(1, 30)} | settings),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (0.0, 1.0, 0),
        (0.7, 0.9, 0),
        (1.3, 1.0, 20),
    ],
    ids=["ordinary", "greedy", "top-p", "top-k"],
)
def test_logps_and_entropies_are_those_of_the_model(
    engine, model_folder, temperature, top_p, top_k
):
    requests = make_requests(
        f"exact{temperature}", 6, temperature=temperature, top_p=top_p, top_k=top_k
    )
    for request, got in zip(requests, engine.call("generate_many", requests), strict=True):
        assert got.request_id == request.request_id
        assert 1 <= len(got.token_ids) <= request.max_tokens
        assert got.version == engine.call("version")
        check_against_transformers(model_folder, request, got)
        if temperature == 0.0:
            assert got.token_ids == got.argmax_ids


@pytest.mark.parametrize(
    "temperature",
    [1.0, 0.7, 0.0],
    ids=["ordinary", "colder", "greedy"],
)
def test_the_most_probable_alternatives_are_those_of_the_model(engine, model_folder, temperature):
    requests = make_requests(f"top{temperature}", 4, temperature=temperature, num_top_logps=10)
    plain = make_requests("beside", 4)
    results = engine.call("generate_many", [*requests, *plain])
    assert all(got.top_logps == () for got in results[4:])
    for request, got in zip(requests, results, strict=False):
        check_against_transformers(model_folder, request, got)
        logp_TV = logits_of(model_folder, request.token_ids, got.token_ids).log_softmax(-1)
        for logp_V, token, listed in zip(logp_TV, got.token_ids, got.top_logps, strict=True):
            best = logp_V.topk(10)
            expected = best.values.tolist()
            if token not in best.indices.tolist():
                expected.append(logp_V[token].item())
            assert sorted(listed, reverse=True) == pytest.approx(expected, abs=1e-3)


def test_requests_of_different_temperature_share_a_batch(engine, model_folder):
    requests = [
        request
        for temperature in (0.0, 0.5, 1.0, 2.0)
        for request in make_requests(f"mixed{temperature}", 8, temperature=temperature)
    ]
    for request, got in zip(requests, engine.call("generate_many", requests), strict=True):
        check_against_transformers(model_folder, request, got)


def stopping_request(engine, stop):
    """A seeded request that samples the token `stop` before its length is reached."""
    settings = {"token_ids": (9, 8, 7), "max_tokens": 100, "temperature": 2.0}
    for start in range(0, 200, 20):
        requests = [
            GenerateRequest(request_id=f"find/{seed}", seed=seed, **settings)
            for seed in range(start, start + 20)
        ]
        for request, got in zip(requests, engine.call("generate_many", requests), strict=True):
            if stop in got.token_ids:
                return request
    raise AssertionError("no seed samples it")


def test_a_single_token_stop_string_ends_generation_and_stays(engine):
    request = replace(stopping_request(engine, stop=3), stop=("</python>", "</search>"))
    got = engine.call("generate", request)
    assert got.finish_reason is FinishReason.stop
    assert got.stop_string == {3: "</python>", 4: "</search>"}[got.token_ids[-1]]
    assert not {3, 4} & set(got.token_ids[:-1])


def test_a_stop_string_of_several_tokens_ends_generation(engine, model_folder):
    plain = make_requests("several", 1, max_tokens=12, seed=3)[0]
    ids = engine.call("generate", plain).token_ids
    stop = f"w{ids[4]} w{ids[5]}"
    got = engine.call("generate", replace(plain, request_id="stop2", stop=(stop,)))
    assert got.finish_reason is FinishReason.stop
    assert got.stop_string == stop
    assert got.token_ids == ids[:6]
    check_against_transformers(model_folder, plain, got)


def test_end_of_text_and_length_are_told_apart(engine):
    request = stopping_request(engine, stop=EOS_ID)
    got = engine.call("generate", request)
    assert got.finish_reason is FinishReason.eos
    assert got.token_ids[-1] == EOS_ID
    short = make_requests("length", 1, max_tokens=1, temperature=0.0)[0]
    assert engine.call("generate", short).finish_reason is FinishReason.length


def test_abort_returns_the_tokens_so_far(engine, model_folder):
    request = make_requests("abort", 1, max_tokens=200, temperature=0.0)[0]
    running = engine.begin("generate", request)
    while not (num_sampled := engine.call("num_sampled")):
        pass
    engine.call("abort", request.request_id)
    got = running.result(DEADLINE_S)
    if got.finish_reason is FinishReason.aborted:
        assert len(got.token_ids) >= num_sampled
    check_against_transformers(model_folder, request, got)
    engine.call("abort", "never heard of")


@pytest.mark.slow(30)
def test_prompts_beyond_one_step_wait_or_are_measured_at_their_end_only(engine, model_folder):
    rng = random.Random(0)
    # Together more than the 8,192 tokens of one step. Seeded requests that were cut there would
    # end the engine of a CPU.
    requests = [
        GenerateRequest(
            request_id=f"long/{index}",
            token_ids=tuple(rng.randrange(5, 300) for _ in range(250)),
            max_tokens=4,
            seed=index,
        )
        for index in range(40)
    ]
    for request, got in zip(requests, engine.call("generate_many", requests), strict=True):
        check_against_transformers(model_folder, request, got)


def test_the_prefix_of_a_fork_is_not_computed_again(engine, model_folder):
    rng, block = random.Random("fork"), CPU_BLOCK_TOKENS
    prompt = tuple(rng.randrange(5, 300) for _ in range(10 * block + 5))
    parent = GenerateRequest(request_id="parent", token_ids=prompt, max_tokens=2 * block, seed=1)
    (grown,) = engine.call("generate_many", [parent])
    assert grown.num_cached_tokens == 0
    whole = prompt + grown.token_ids
    assert len(whole) > 11 * block, "the seed's answer ends too early for this test"
    lengths = (10 * block, 10 * block + 7, 11 * block, len(whole))
    forks = [
        GenerateRequest(request_id=f"fork/{size}", token_ids=whole[:size], max_tokens=4, seed=size)
        for size in lengths
    ]
    for fork, got in zip(forks, engine.call("generate_many", forks), strict=True):
        assert 0 < len(fork.token_ids) - got.num_cached_tokens <= block
        check_against_transformers(model_folder, fork, got)


class RemoteGenerator:
    """The engine's host as a generator."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, request):
        return await asyncio.wrap_future(self.engine.begin("generate", request))

    async def abort(self, request_id):
        await asyncio.wrap_future(self.engine.begin("abort", request_id))


class WordCodec:
    """One token per word; tools find no call in its texts."""

    eos_id, vocab_size = EOS_ID, 300

    def encode(self, text):
        return [int(word[1:]) for word in text.split()]

    def decode(self, token_ids):
        return " ".join(f"w{token}" for token in token_ids)


@pytest.mark.slow(5)
async def test_greedy_and_seeded_trees_do_not_depend_on_what_runs_beside_them(engine):
    rng = random.Random("trees")
    prompts = [
        make_prompt(f"p{n}", token_ids=tuple(rng.randrange(5, 300) for _ in range(20 + n)))
        for n in range(4)
    ]

    async def trees_of(asked, temperature):
        context = make_rollout_context(
            generator=RemoteGenerator(engine),
            tools=FakeTools(),
            codec=WordCodec(),
            config=RolloutConfig(group_size=4, max_response_tokens=24),
            max_model_len=512,
            seed=3,
            step=1,
            temperature=temperature,
        )
        trees = await collect_rollouts(asked, FakeRubric(), context)
        return [[one.token_ids for one in tree.trajectories] for tree in trees]

    for temperature in (0.0, 1.0):
        together = await trees_of(prompts, temperature)
        alone = [tree for prompt in prompts for tree in await trees_of([prompt], temperature)]
        assert together == alone
        assert all(len(token_ids) > 0 for tree in together for token_ids in tree)
    assert len({tuple(map(tuple, tree)) for tree in together}) == 4


async def test_a_greedy_request_that_is_held_in_its_middle_gives_the_same(engine, model_folder):
    request = long_request("held")
    (whole,) = engine.call("generate_many", [request])
    held = InterruptibleGenerator(RemoteGenerator(engine), WordCodec())
    running = asyncio.create_task(held.generate(request))
    while not await asyncio.wrap_future(engine.begin("num_sampled")) and not running.done():
        pass
    await held.interrupt_requests()
    while not held.num_waiting and not running.done():
        await asyncio.sleep(0.01)
    assert held.num_waiting == 1, "it was over before it could be held"
    held.continue_requests()
    got = await running
    assert got.token_ids == whole.token_ids and got.finish_reason is whole.finish_reason
    assert len(got.versions) == len(got.token_ids)
    check_against_transformers(model_folder, request, got)


@pytest.mark.slow(4)
def test_measurements_come_without_a_call_of_the_workers(engine, model_folder):
    requests = make_requests("uncalled", 20, temperature=0.7)
    results, called = engine.call("generate_counting_calls", requests)
    assert called == []
    for request, got in zip(requests, results, strict=True):
        check_against_transformers(model_folder, request, got)


def test_no_request_leaves_measurements_behind(engine):
    engine.call("generate_many", make_requests("clean", 20))
    assert engine.call("num_open") == 0
    long = make_requests("cancelled", 1, max_tokens=200, seed=1)[0]
    assert engine.call("start_and_cancel", long)
    engine.call("generate_many", make_requests("after", 3))
    assert engine.call("num_open") == 0


def test_pause_holds_new_requests_back(engine):
    engine.call("pause")
    waiting = engine.begin("generate", make_requests("paused", 1)[0])
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    engine.call("resume")
    assert waiting.result(DEADLINE_S).token_ids


def test_bad_requests_are_refused(engine):
    request = GenerateRequest(request_id="bad", token_ids=(5,) * 512, max_tokens=4)
    with pytest.raises(InputError) as caught:
        engine.call("generate", request)
    assert (caught.value.name, caught.value.got) == ("request bad: prompt tokens", 512)


# --- Weight updates ---

PROMPT = tuple(range(5, 85))
LONG_PROMPT = tuple(range(5, 25))
"""Greedy answers to it do not end, with either of the models."""


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("new"), seed=1, scale=4.0)


@pytest.fixture(scope="module")
def trainer(model_folder):
    trainer = FakeTrainer(model_folder)
    yield trainer
    trainer.close()


@pytest.fixture
def update(engine, trainer, model_folder):
    with LiveTransfer.connected(trainer, engine, model_folder) as update:
        yield update


def request(name, prompt=PROMPT):
    return GenerateRequest(request_id=name, token_ids=prompt, max_tokens=20)


def check_serves(engine, folder, name):
    """The engine's numbers are those of the model in `folder`."""
    got = engine.call("generate", request(name))
    assert got.version == engine.call("version")
    check_against_transformers(folder, request(name), got)


def prompt_logps(folder):
    """Of the tokens of PROMPT after the first, by transformers."""
    logp_TV = logits_of(folder, PROMPT[:1], PROMPT[1:]).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def check_refuses_at_once(engine, message):
    check_is_refusal(engine.begin("generate", request("refused")), message)


def check_is_refusal(call, message):
    """The call ends because the engine refuses requests, for a reason with this text."""
    refusal = call.exception(DEADLINE_S)
    assert isinstance(refusal, EngineRefusalError)
    assert message in refusal.reason


@pytest.mark.slow(20)
def test_a_worker_reports_the_layout_that_its_loader_has(update, model_folder):
    assert update.layouts == [trace_engine_layouts(model_folder, 1, "float32")]


def test_updates_take_effect_though_the_prompt_was_cached(engine, update, model_folder, new_folder):
    check_serves(engine, model_folder, "before")
    check_serves(engine, model_folder, "cached")
    for version, folder in enumerate((new_folder, model_folder), 1):
        update(folder, version)
        assert engine.call("version") == version
        for _ in range(2):
            found_T = torch.tensor(engine.call("compute_prompt_log_probs", PROMPT))
            torch.testing.assert_close(found_T, prompt_logps(folder), rtol=0, atol=1e-3)
        check_serves(engine, folder, f"after {version}")


def test_a_request_during_an_update_waits_for_it(engine, update, new_folder):
    results = update.move(new_folder, 5)
    waiting = engine.begin("generate", request("waits"))
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    update.prove(5, results)
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    engine.call("resume")
    got = waiting.result(DEADLINE_S)
    assert got.version == 5
    check_against_transformers(new_folder, request("waits"), got)


def test_a_failed_update_is_refused_until_a_good_one(engine, update, trainer, new_folder):
    update(new_folder, 1)
    fault = Fault(kind="flip", rank=1, frame=1, bit=77)
    waiting = []
    message = r"verification failed: \S+ Rect.* rank 4 .*rank 1 in bucket"
    with pytest.raises(RuntimeError, match=message):
        results = update.move(new_folder, 2, fault=fault)
        waiting.append(engine.begin("generate", request("waited")))
        update.prove(2, results)
    assert any(name in str(waiting[0].exception(DEADLINE_S)) for name in trainer.hit.names)
    check_refuses_at_once(engine, "the update to version 2 failed: worker 0: weight version 2")
    check_is_refusal(engine.begin("resume"), "the update to version 2 failed")
    assert engine.call("version") == 1
    update.connect()
    check_refuses_at_once(engine, "the update to version 2 failed")
    update(new_folder, 3)
    check_serves(engine, new_folder, "recovered")


def test_an_engine_refused_by_the_driver_serves_again_after_an_update(engine, update, new_folder):
    update(new_folder, 1)
    engine.call("refuse_requests", "the probe differs")
    check_refuses_at_once(engine, "the probe differs")
    engine.call("pause")
    waiting = engine.begin("generate", request("waits for the next"))
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    check_is_refusal(engine.begin("resume"), "the probe differs")
    check_is_refusal(waiting, "the probe differs")
    update.connect()
    update(new_folder, 2)
    check_serves(engine, new_folder, "served again")


def test_steps_of_an_update_out_of_order_are_refused(engine, update, new_folder):
    none = [np.zeros((0, 2), dtype=np.uint32)]
    with pytest.raises(RuntimeError):
        engine.call("receive_weights", 1)  # not paused
    with pytest.raises(RuntimeError):
        engine.call("verify_weights", 1, none)  # not received
    update.move(new_folder, 2)
    check_is_refusal(engine.begin("resume"), "in the middle of a weight update")
    check_refuses_at_once(engine, "in the middle of a weight update")
    update.connect()
    update(new_folder, 3)
    check_serves(engine, new_folder, "in order")


def test_an_update_that_was_left_unfinished_does_not_hinder_the_next(engine, update, new_folder):
    update.move(new_folder, 1)
    with pytest.raises(RuntimeError):
        engine.call("receive_weights", 2)
    update.connect()
    check_refuses_at_once(engine, "an update was left unfinished")
    update(new_folder, 3)
    check_serves(engine, new_folder, "the next")


@pytest.mark.slow(7)
def test_ranks_that_do_not_join_are_named_and_the_engine_serves_on(engine, update, new_folder):
    update(new_folder, 1)
    short = FakeTrainer(new_folder, timeout_s=6.0)
    try:
        session = short.connect([update.layouts[0][0]], away=[2])
        short.wait_at_store(session)
        with pytest.raises(RuntimeError, match=r"joining .* failed: .*missing: .*rank 2"):
            engine.call("join_weight_transfer", session, session.plan.num_trainer_ranks)
    finally:
        short.close()
    check_serves(engine, new_folder, "as before")
    update.connect()
    update(new_folder, 2)


# --- Weight updates in flight ---


def long_request(name):
    """A request that does not end by itself for a while."""
    return GenerateRequest(request_id=name, token_ids=LONG_PROMPT, max_tokens=400, temperature=0.0)


def begin_long_request(engine, name, num_tokens=20):
    """Start a request and return it when it has this many tokens at least."""
    running = engine.begin("generate", long_request(name))
    while engine.call("num_sampled") < num_tokens:
        assert not running.done(), "it was over before it could be held"
    return running


def check_versions(got, folder_of):
    """Every token is that of the weights of its version, after all tokens before it."""
    assert len(got.versions) == len(got.token_ids)
    assert list(got.versions) == sorted(got.versions)
    assert set(got.versions) == set(folder_of)
    for version, folder in folder_of.items():
        logp_TV = logits_of(folder, LONG_PROMPT, got.token_ids).log_softmax(-1)
        own_T = torch.tensor(got.versions) == version
        expected_T = logp_TV.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        found_T, found_entropy_T = torch.tensor(got.logps), torch.tensor(got.entropies)
        torch.testing.assert_close(found_T[own_T], expected_T[own_T], rtol=0, atol=1e-3)
        torch.testing.assert_close(found_entropy_T[own_T], entropy_T[own_T], rtol=0, atol=1e-3)


def test_a_held_request_goes_on_with_the_new_weights(engine, update, model_folder, new_folder):
    update(model_folder, 1)
    running = begin_long_request(engine, "held")
    results = update.move(new_folder, 2, hold=True)
    num_before = engine.call("num_sampled")
    update.prove(2, results)
    assert engine.call("num_sampled") == num_before, "it went on before the end of the update"
    engine.call("compute_prompt_log_probs", PROMPT)
    with pytest.raises(TimeoutError):
        running.result(3.0)  # it has ended in vLLM, and the driver may still refuse the weights
    engine.call("resume")
    got = running.result(DEADLINE_S)
    assert got.version == 2
    assert num_before <= got.versions.count(1) <= num_before + 1
    check_versions(got, {1: model_folder, 2: new_folder})
    # Its tokens of older weights are in no cache: the same prompt anew has those of the new ones.
    fork = replace(request("fork", LONG_PROMPT + got.token_ids[: num_before - 1]), max_tokens=4)
    check_against_transformers(new_folder, fork, engine.call("generate", fork))
    assert engine.call("num_open") == 0


def test_a_held_request_fails_with_its_update(engine, update, model_folder, new_folder):
    update(model_folder, 1)
    running = begin_long_request(engine, "held in vain")
    with pytest.raises(RuntimeError, match="verification failed"):
        fault = Fault(kind="flip", rank=1, frame=1, bit=77)
        update.prove(2, update.move(new_folder, 2, fault=fault, hold=True))
    check_is_refusal(running, "the update to version 2 failed")
    check_refuses_at_once(engine, "the update to version 2 failed")
    update.connect()
    update(new_folder, 3)
    check_serves(engine, new_folder, "after a failed hold")
    assert engine.call("num_open") == 0


@pytest.mark.slow(4)
@pytest.mark.parametrize("wait_s", [0.0, 3.0], ids=["running", "ended"])
def test_a_held_request_fails_if_the_driver_refuses_the_weights(engine, update, new_folder, wait_s):
    update(new_folder, 1)
    running = begin_long_request(engine, "refuted")
    update.prove(2, update.move(new_folder, 2, hold=True))
    engine.call("compute_prompt_log_probs", PROMPT)
    with pytest.raises(TimeoutError):
        running.result(wait_s)
    engine.call("refuse_requests", "the probe differs")
    check_is_refusal(running, "the probe differs")
    update.connect()
    update(new_folder, 3)
    check_serves(engine, new_folder, "after a refused hold")


@pytest.mark.slow(7)
def test_a_request_is_held_over_several_updates(engine, update, model_folder, new_folder):
    update(model_folder, 1)
    running = begin_long_request(engine, "patient")
    for version, folder in ((2, new_folder), (3, model_folder)):
        before = engine.call("num_sampled")
        update(folder, version, hold=True)
        while not running.done() and engine.call("num_sampled") < before + 20:
            pass
    check_versions(running.result(DEADLINE_S), {1: model_folder, 2: new_folder, 3: model_folder})
