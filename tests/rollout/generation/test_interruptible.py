"""Interrupted requests: the merged generation equals an uninterrupted one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.rollout.generation.interruptible import (
    InterruptibleGenerator,
    truncate_generation,
)
from mega_agentrl.types.records import FinishReason, GenerateRequest
from tests.fakes import EOS, CharCodec, FakeGenerator, turns
from tests.rollout.routed_engine import RoutedEngine, routes_of
from tests.rollout.stepped_engine import SteppedGenerator

STOPS = ("</search>", "</python>")
TEXTS = ("abc<search>q</search>", f"word <b>{EOS}", "<<</searc</search>", "x" * 40)


def _request(max_tokens=30, stop=STOPS):
    token_ids = tuple(map(ord, "Q?"))
    return GenerateRequest(
        request_id="p/0/0/0.0", token_ids=token_ids, max_tokens=max_tokens, seed=7, stop=stop
    )


def _start(engine, request):
    """A generator over the engine, and the task of the request."""
    interruptible = InterruptibleGenerator(engine, CharCodec())
    return interruptible, asyncio.create_task(interruptible.generate(request))


async def _run(num_turns):
    """Let the event loop turn that often."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def _wait_until_interrupted(interruptible, task):
    while not task.done() and not interruptible.num_waiting:
        await interruptible.interrupt_requests()
        await asyncio.sleep(0)


async def _interrupt(engine, request, waits):
    """The generation, interrupted after each of these numbers of turns of the event loop."""
    interruptible, task = _start(engine, request)
    for num_turns in waits:
        await _run(num_turns)
        await _wait_until_interrupted(interruptible, task)
        assert task.done() or not engine.running
        engine.version += 1
        interruptible.continue_requests()
    generation = await asyncio.wait_for(task, 300)
    assert interruptible.num_waiting == 0 and not engine.running
    return generation


async def test_running_requests_and_serving_engines_are_reported():
    engine = SteppedGenerator(turns(TEXTS[0]))
    interruptible, task = _start(engine, _request())
    assert not interruptible.has_running_requests and interruptible.can_serve
    await _run(1)
    assert interruptible.has_running_requests
    await _wait_until_interrupted(interruptible, task)
    assert not interruptible.has_running_requests and not task.done()
    engine.can_serve = False
    assert not interruptible.can_serve
    interruptible.continue_requests()
    await asyncio.wait_for(task, 300)
    assert not interruptible.has_running_requests


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TEXTS),
    st.integers(1, 30),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_the_text_is_as_without_interruption(text, max_tokens, waits):
    request = _request(max_tokens)
    plain = asyncio.run(FakeGenerator(turns(text)).generate(request))
    engine = SteppedGenerator(turns(text))
    got = asyncio.run(_interrupt(engine, request, waits))
    for name in ("request_id", "token_ids", "argmax_ids", "finish_reason", "stop_string"):
        assert getattr(got, name) == getattr(plain, name), name
    assert len(got.logps) == len(got.entropies) == len(got.token_ids)
    versions = got.versions or (got.version,) * len(got.token_ids)
    assert list(versions) == sorted(versions)
    assert versions[-1] <= got.version <= engine.version


def test_tokens_keep_the_version_they_were_sampled_with():
    engine = SteppedGenerator(turns("0123456789" + EOS))
    got = asyncio.run(_interrupt(engine, _request(), [4, 3]))
    assert "".join(map(chr, got.token_ids)) == "0123456789" + EOS
    first, second, third = (got.versions.count(version) for version in (1, 2, 3))
    assert first and second and third and first + second + third == 11
    one, two, three = engine.requests
    assert len(one.token_ids) == 2
    assert len(two.token_ids) == 2 + first and two.max_tokens == 30 - first
    assert len(three.token_ids) == 2 + first + second
    assert len({one.seed, two.seed, three.seed}) == 3


async def test_without_an_interruption_the_engines_generation_passes():
    engine = FakeGenerator(turns("abc" + EOS))
    _, task = _start(engine, _request())
    got = await task
    assert got == await engine.generate(_request()) and got.versions == ()


async def test_a_request_that_comes_while_interrupted_waits():
    engine = FakeGenerator(turns("abc" + EOS))
    interruptible = InterruptibleGenerator(engine, CharCodec())
    await interruptible.interrupt_requests()
    task = asyncio.create_task(interruptible.generate(_request()))
    await _run(5)
    assert interruptible.num_waiting == 1 and not engine.requests
    interruptible.continue_requests()
    assert (await asyncio.wait_for(task, 300)).finish_reason is FinishReason.eos


async def test_an_abort_ends_the_request():
    interruptible, task = _start(SteppedGenerator(turns("0123456789" + EOS)), _request())
    await _run(4)
    await interruptible.abort("p/0/0/0.0")
    got = await asyncio.wait_for(task, 300)
    assert got.finish_reason is FinishReason.aborted and 0 < len(got.token_ids) < 11


async def test_a_dead_engine_is_no_pause():
    engine = SteppedGenerator(turns("ab" + EOS), breaks=lambda request: True, delays=1)
    interruptible, task = _start(engine, _request())
    await _run(1)
    await interruptible.interrupt_requests()
    with pytest.raises(RuntimeError) as caught:
        await asyncio.wait_for(task, 300)
    assert caught.value.args == ("engine 0 died",)


async def test_cancelling_an_interrupted_request_leaves_no_request():
    engine = SteppedGenerator(turns("0123456789" + EOS))
    interruptible, task = _start(engine, _request())
    await _run(4)
    await _wait_until_interrupted(interruptible, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert interruptible.num_waiting == 0 and not engine.running


async def test_an_interrupted_request_has_the_routes_of_all_its_tokens():
    request = replace(_request(), routes_start=1)
    engine = RoutedEngine(SteppedGenerator(turns(TEXTS[3])))
    got = await _interrupt(engine, request, [2, 3, 1])
    tokens = (*request.token_ids, *got.token_ids)
    expected = routes_of(tokens, 1, len(tokens) - 1)
    assert engine.num_requests > 1
    assert np.array_equal(got.routes.expert_NLK, expected.expert_NLK)
    assert engine.num_routes == expected.num_tokens
    cut = truncate_generation(got, 5).routes
    assert (cut.start, cut.stop) == (1, len(request.token_ids) + 4)
