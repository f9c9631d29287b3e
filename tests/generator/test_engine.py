"""An engine around a vLLM that dies; `test_live_engine` has a real one."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError

from mega_agentrl.generator import engine as engine_module
from mega_agentrl.generator.engine import STUCK_TIMEOUT_S, Engine, TokenProgress, to_start_error
from mega_agentrl.types.errors import EngineLostError


class Vllm:
    """Answers calls to its workers with given values; dies when told."""

    def __init__(self, *answers):
        self.answers, self.errored = list(answers), False
        self.calls = []

    async def collective_rpc(self, method, args=()):
        self.calls.append(method)
        answer = self.answers.pop(0)
        if answer == "never":
            self.errored = True
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause_generation(self, mode, clear_cache):
        raise EngineDeadError


@pytest.fixture
def hollow(monkeypatch):
    """An engine around `Vllm` that nothing runs in."""
    monkeypatch.setattr(engine_module, "DEATH_POLL_S", 0.01)
    engine = Engine("engine 3")
    engine._idle_event.set()
    return engine


async def test_the_cause_is_told_before_what_followed_from_it(hollow):
    hollow._llm = Vllm([(True, "lost rank 5"), None, (False, "a bucket was lost"), (True, "late")])
    assert await hollow._worker_failures() == (
        "worker 2: a bucket was lost; worker 0: lost rank 5; worker 3: late"
    )
    hollow._llm = Vllm([None, None])
    assert await hollow._worker_failures() is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (EngineDeadError(), "engine 3 is dead"),
        ("never", "engine 3 is dead"),
        (Exception("Call to collective_rpc failed: cancelled"), "vLLM failed: Call to .*cancelled"),
    ],
)
async def test_a_dying_engine_is_named_and_refuses(hollow, answer, message):
    hollow._llm = Vllm(answer)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match=message):
            await hollow.layout()
        await hollow.refuse_requests("others failed")  # a dead engine refuses without an error
    assert hollow._refusal_reason is not None
    assert hollow._serving_event.is_set()


async def test_errors_of_our_own_are_not_taken_for_death(hollow):
    hollow._llm = Vllm([("no rectangle describes it", b"")])
    with pytest.raises(ValueError, match="engine 3, worker 0: no rectangle"):
        await hollow.layout()
    assert hollow._refusal_reason is None


def test_stuck_is_no_token_while_requests_run():
    now = [0.0]
    progress = TokenProgress(lambda: now[0])
    assert progress.stuck_s(0, 1) is None
    now[0] = STUCK_TIMEOUT_S
    assert progress.stuck_s(0, 1) is None
    now[0] = STUCK_TIMEOUT_S + 1
    assert progress.stuck_s(0, 1) == STUCK_TIMEOUT_S + 1
    assert progress.stuck_s(1, 1) is None, "a token came"
    now[0] += 2 * STUCK_TIMEOUT_S
    assert progress.stuck_s(1, 0) is None, "nothing runs"
    now[0] += STUCK_TIMEOUT_S
    assert progress.stuck_s(1, 1) is None, "it has just begun"


def test_a_start_that_a_signal_ended_is_a_lost_engine():
    message = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    for codes, is_lost in (
        ("{'EngineCore': -9}", True),
        ("{'EngineCore': 1}", False),
        ("{}", True),
    ):
        failure = to_start_error("engine 3", RuntimeError(message.format(codes)))
        assert isinstance(failure, EngineLostError) is is_lost, codes
        assert str(failure).startswith("engine 3 did not start")
        assert codes in str(failure)
