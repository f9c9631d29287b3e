"""An engine around a vLLM that dies; `test_live_engine` has a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError

from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator import engine as engine_module
from mega_agentrl.generator.engine import Engine, to_start_error
from mega_agentrl.generator.progress_monitor import ProgressMonitor
from mega_agentrl.generator.sampling import StopTokenTable
from mega_agentrl.generator.sleep_mode import SleepController
from mega_agentrl.types.errors import EngineLostError, EngineRefusalError
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.records import FinishReason, GenerateRequest
from tests.generator.fake_vllm import NEVER, FakeVllm


@pytest.fixture
def hollow(monkeypatch):
    """An engine that nothing runs in; the test sets its vLLM."""
    monkeypatch.setattr(engine_module, "DEATH_POLL_S", 0.01)
    engine = Engine("engine 3")
    engine._config = EngineConfig()
    engine._idle_event.set()
    return engine


async def test_causes_of_a_failure_come_before_consequences(hollow):
    hollow._llm = FakeVllm(
        [(True, "lost rank 5"), None, (False, "a bucket was lost"), (True, "late")]
    )
    assert await hollow._worker_failures() == (
        "worker 2: a bucket was lost; worker 0: lost rank 5; worker 3: late"
    )
    hollow._llm = FakeVllm([None, None])
    assert await hollow._worker_failures() is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        # The error leaves the engine's process as text.
        (EngineDeadError(), "engine 3 is dead"),
        (NEVER, "engine 3 is dead"),
        (Exception("Call to collective_rpc failed: cancelled"), "engine 3: .* cancelled"),
    ],
    ids=["dead", "no-answer", "failed-call"],
)
async def test_a_dying_engine_is_named_and_refuses(hollow, answer, message):
    hollow._llm = FakeVllm(answer)
    async with asyncio.timeout(60):
        with pytest.raises(EngineLostError, match=message):
            await hollow.layout()
        await hollow.refuse_requests("others failed")  # a dead engine refuses without an error
    assert not hollow.can_serve
    assert hollow._serving_event.is_set()


async def test_errors_of_our_own_do_not_count_as_the_death_of_vllm(hollow):
    hollow._llm = FakeVllm([("no rectangle describes it", b"")])
    with pytest.raises(ValueError, match="engine 3, worker 0: no rectangle"):
        await hollow.layout()
    assert hollow.can_serve


async def test_an_engine_sleeps_when_nothing_runs_and_does_not_serve_without_weights(hollow):
    hollow._llm = vllm = FakeVllm()
    hollow._sleep_controller = SleepController(
        vllm, hollow._await_vllm, has_sleep_mode=True, has_weights=True
    )
    hollow._serving_event.set()
    with hollow._track_running(asyncio.timeout(None)):
        sleeping = asyncio.create_task(hollow.sleep())
        await asyncio.sleep(0.01)
        assert vllm.calls == []
    await sleeping
    assert vllm.calls == ["pause_generation", "weights_release", "sleep 2 wait"]
    with pytest.raises(EngineRefusalError) as caught:
        await hollow.resume()
    assert (caught.value.engine, caught.value.operation) == ("engine 3", "serve")
    assert not hollow.can_serve


async def test_workers_are_asked_for_their_health_only_while_no_token_comes(hollow):
    hollow._llm = vllm = FakeVllm()
    await hollow.check_health()
    assert vllm.calls == ["check_health"], "nothing runs"
    logprobs = [-1.0]
    vllm.output_processor.request_states["0-a"] = SimpleNamespace(
        external_req_id="0", logprobs_processor=SimpleNamespace(logprobs=logprobs)
    )
    for num_calls in (1, 2):  # a first token, then none
        await hollow.check_health()
        assert len(vllm.calls) == num_calls
    logprobs.append(-1.0)
    await hollow.check_health()
    assert len(vllm.calls) == 2
    vllm.answers.append(EngineDeadError())
    with pytest.raises(EngineLostError, match="engine 3 is dead"):
        await hollow.check_health()


class WaitingPrompts:
    """Renders a prompt once the test lets it."""

    tokens, banned_ids = None, ()

    def __init__(self):
        self.can_render = asyncio.Event()

    async def render(self, request):
        await self.can_render.wait()
        return {"type": "token", "prompt_token_ids": list(request.token_ids)}


@pytest.fixture
def serving(hollow, monkeypatch):
    """An engine that serves with a fake vLLM, and waits before each request reaches it."""
    monkeypatch.setattr(engine_module, "check_images", lambda *_: None)
    hollow._config = EngineConfig(max_num_seqs=2)
    hollow._image_slots = asyncio.Semaphore(2)
    hollow._request_deadline_s = 60.0
    hollow._image_prompts = WaitingPrompts()
    hollow._stop_table = StopTokenTable(None)
    hollow._llm = FakeVllm()
    hollow._serving_event.set()
    return hollow


@pytest.mark.parametrize("phase", ["pixels", "render", "pause"])
async def test_a_request_that_is_aborted_before_it_reaches_vllm_ends_without_it(serving, phase):
    has_pixels = asyncio.Event()

    async def load_images(request):
        await has_pixels.wait()
        return request

    events = {
        "pixels": has_pixels,
        "render": serving._image_prompts.can_render,
        "pause": serving._serving_event,
    }
    for name, event in events.items():
        event.clear() if name == phase else event.set()
    serving._llm.can_finish.set()
    request = GenerateRequest(request_id="a/0", token_ids=(1, 2), max_tokens=4)
    running = asyncio.create_task(serving.generate(request, load_images))
    await asyncio.sleep(0)
    await serving.abort("a/0")
    events[phase].set()
    async with asyncio.timeout(60):
        got = await running
        assert (got.finish_reason, got.token_ids) == (FinishReason.aborted, ())
        await serving._idle_event.wait()
        again = await serving.generate(request)  # the id is free, and not aborted
    assert again.finish_reason is FinishReason.length
    assert serving._llm.calls == ["abort 0", "generate 1"]


@pytest.fixture
async def crowd(serving):
    """Running requests with images, one more than vLLM can run, and one of text."""
    serving._image_prompts.can_render.set()
    sizes = {"width": 28, "height": 28, "grid_thw": (1, 2, 2), "merge_size": 2}
    placed = PlacedImage(start=1, image=ImageInput(image_id="image", data=b"file", **sizes))
    running = [
        asyncio.create_task(
            serving.generate(
                GenerateRequest(request_id=name, token_ids=(1, 2), max_tokens=4, images=images)
            )
        )
        for name, images in (("a", (placed,)), ("b", (placed,)), ("c", (placed,)), ("text", ()))
    ]
    await asyncio.sleep(0)
    return running


async def test_a_request_with_images_waits_until_vllm_can_run_it(serving, crowd):
    vllm = serving._llm
    assert vllm.calls == ["generate 0", "generate 1", "generate 3"]
    pausing = asyncio.create_task(serving.pause())
    await asyncio.sleep(0)
    vllm.can_finish.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*crowd, pausing)
    assert vllm.calls[3:] == ["generate 2", "pause_generation"]


async def test_a_request_that_waits_fails_with_those_that_are_held(serving, crowd):
    async with asyncio.timeout(60):
        await serving.pause(hold=True)
        await serving.refuse_requests("a bucket was lost")
        errors = await asyncio.gather(*crowd, return_exceptions=True)
    assert ["a bucket was lost" in str(error) for error in errors] == [True] * 4
    assert "generate 2" not in serving._llm.calls


def test_an_engine_is_quiet_while_requests_run_without_a_token():
    now = [0.0]
    progress = ProgressMonitor(lambda: now[0])
    assert progress.quiet_s(0, 1) == 0
    now[0] = 30.0
    assert progress.quiet_s(0, 1) == 30
    assert progress.quiet_s(1, 1) == 0, "a token came"
    now[0] += 30
    assert progress.quiet_s(1, 0) == 0, "nothing runs"
    now[0] += 30
    assert progress.quiet_s(1, 1) == 30, "since something last did not run"


async def test_an_engine_has_five_times_as_long_for_its_first_token(hollow):
    """Kernels are compiled for the first request, and a second compilation would take as long."""
    hollow._config = EngineConfig(stuck_timeout_s=180.0)
    hollow._llm, now = FakeVllm(), [0.0]
    hollow._progress = ProgressMonitor(lambda: now[0])
    with hollow._track_running(asyncio.timeout(None)):
        for num_tokens, limit_s in ((0, 900), (1, 180)):
            hollow._num_finished_tokens = num_tokens
            await hollow.check_health()
            now[0] += limit_s
            await hollow.check_health()
            now[0] += 1
            with pytest.raises(EngineLostError) as caught:
                await hollow.check_health()
            assert f"no token for its 1 requests in {limit_s + 1} s" in str(caught.value)
            assert "engine.stuck_timeout_s=180" in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "is_lost"),
    [("{'EngineCore': -9}", True), ("{'EngineCore': 1}", False), ("{}", True)],
    ids=["killed", "failed", "no-code-yet"],
)
def test_a_start_that_a_signal_ended_is_a_lost_engine(codes, is_lost):
    message = f"Engine core initialization failed. Failed core proc(s): {codes}"
    error = to_start_error("engine 3", RuntimeError(message))
    assert isinstance(error, EngineLostError) is is_lost
    assert "engine 3" in str(error)
    assert codes in str(error)
