"""A trajectory's tools: life cycle, typed outcomes, limits and forks; no state is left open."""

import asyncio
import contextlib
import itertools
import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from mega_agentrl.errors import InputError
from mega_agentrl.tool import session as session_module
from mega_agentrl.tool.base import Tool, ToolInputError, ToolResponse
from mega_agentrl.tool.session import MAX_RESPONSE_CHARS, SessionLimits
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolStatus


def now_s():
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Sessions read the clock of the loop, which is virtual; see `conftest`."""
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=now_s))


class Notes(Tool):
    """Remembers its texts; `fault` is what `execute` raises or returns instead."""

    name = "notes"
    text_argument = "text"
    timeout_s = 0.2

    def __init__(self):
        self.num_run = 0
        self.released = []
        self.fault = None

    async def create(self, kwargs):
        return list(kwargs.get("start", []))

    async def execute(self, state, arguments, kwargs):
        self.num_run += 1
        if self.fault == "hang":
            await asyncio.sleep(30)
        if isinstance(self.fault, BaseException):
            raise self.fault
        if self.fault is not None:
            return self.fault
        state.append(arguments["text"])
        return ToolResponse(text=",".join(state), step_reward=kwargs.get("reward", 0.0))

    async def fork(self, state):
        return list(state)

    async def calc_reward(self, state, kwargs):
        return len(state) * kwargs.get("each", 1.0)

    async def release(self, state, kwargs):
        self.released.append((tuple(state), dict(kwargs)))


class Plain(Tool):
    """Defines nothing but what a tool must."""

    name = "plain"
    text_argument = "x"

    async def execute(self, state, arguments, kwargs):
        return ToolResponse(text=str(state))


LIFE = ("create", "fork", "calc_reward", "release")


class Fragile(Tool):
    """Fails, hangs or waits for a gate at one step of its life; counts its open states."""

    name = "fragile"
    text_argument = "x"
    max_concurrent = 1

    def __init__(self, step="", how="fail"):
        self.step, self.how = step, how
        self.entered, self.gate = asyncio.Event(), asyncio.Event()
        self.num_open = 0

    async def _at(self, step):
        if step != self.step:
            return
        self.entered.set()
        if self.how == "fail":
            raise OSError("no disk")
        await (asyncio.sleep(600) if self.how == "hang" else self.gate.wait())

    async def create(self, kwargs):
        await self._at("create")
        self.num_open += 1
        return {}

    async def execute(self, state, arguments, kwargs):
        await self._at("execute")
        return ToolResponse(text="ok")

    async def fork(self, state):
        await self._at("fork")
        self.num_open += 1
        return {}

    async def calc_reward(self, state, kwargs):
        await self._at("calc_reward")

    async def release(self, state, kwargs):
        self.num_open -= 1
        await self._at("release")


def new_session():
    notes = Notes()
    return ToolKit([notes, Plain()]).open_session(), notes


async def test_kwargs_reach_each_step_of_the_life():
    session, notes = new_session()
    kwargs = {
        "create_kwargs": {"start": ["s"]},
        "execute_kwargs": {"reward": 0.25},
        "calc_reward_kwargs": {"each": 2.0},
        "release_kwargs": {"why": "end"},
    }
    await session.create({"notes": kwargs})
    outcome = await session.execute("notes", {"text": "a"})
    assert (outcome.tool, outcome.status, outcome.answer) == ("notes", ToolStatus.ok, "s,a")
    assert outcome.step_reward == 0.25
    assert await session.calc_reward() == {"notes": 4.0}
    await session.release()
    await session.release()
    assert notes.released == [(("s", "a"), {"why": "end"})]


INFRA_ERROR = ToolStatus.infra_error


@pytest.mark.parametrize(
    ("fault", "status", "answer"),
    [
        pytest.param(ToolInputError("bad"), ToolStatus.user_error, "bad", id="policy's fault"),
        pytest.param(ValueError("bug"), INFRA_ERROR, "ValueError: bug", id="value error"),
        pytest.param(
            json.JSONDecodeError("no object", "<html>", 0), INFRA_ERROR, "JSONDecode", id="json"
        ),
        pytest.param(
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), INFRA_ERROR, "Unicode", id="unicode"
        ),
        pytest.param(
            ValidationError.from_exception_data("Answer", []), INFRA_ERROR, "Answer", id="pydantic"
        ),
        pytest.param(InputError("k", 1, "2"), INFRA_ERROR, "InputError", id="input error"),
        pytest.param(RecursionError("deep"), INFRA_ERROR, "RecursionError", id="recursion"),
        pytest.param(KeyError("bug"), INFRA_ERROR, "KeyError: 'bug'", id="other error"),
        pytest.param("hang", ToolStatus.timeout, "0.2 s", id="hangs"),
        pytest.param(TimeoutError("io"), INFRA_ERROR, "TimeoutError: io", id="inner timeout"),
        pytest.param(asyncio.CancelledError(), INFRA_ERROR, "itself", id="cancels itself"),
        pytest.param("text", INFRA_ERROR, "returned str", id="no response"),
        pytest.param(
            ToolResponse(text="", step_reward=float("nan")), INFRA_ERROR, "nan", id="no number"
        ),
    ],
)
async def test_failures_are_typed_and_run_once(fault, status, answer):
    session, notes = new_session()
    await session.create({})
    notes.fault = fault
    outcome = await session.execute("notes", {"text": "a"})
    assert outcome.status is status and answer in outcome.answer
    assert notes.num_run == 1 and not outcome.is_invalid_call
    notes.fault = None
    assert (await session.execute("notes", {"text": "a"})).answer == "a"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        pytest.param("plain", {"x": "a"}, id="tool of other prompts"),
        pytest.param("nothing", {}, id="no tool"),
        pytest.param("notes", {"y": "1"}, id="other argument"),
        pytest.param("notes", {"text": 3}, id="other type"),
        pytest.param("notes", {"text": "a", "more": 1}, id="too many arguments"),
    ],
)
async def test_a_malformed_call_is_an_error_of_the_policy_and_not_run(tool, arguments):
    session, notes = new_session()
    await session.create({"notes": {}})
    outcome = await session.execute(tool, arguments)
    assert outcome.status is ToolStatus.user_error and outcome.is_invalid_call
    assert tool in outcome.answer
    assert notes.num_run == 0


async def test_a_response_loses_metrics_that_cannot_be_written_and_text_beyond_the_limit():
    session, notes = new_session()
    await session.create({})
    metrics = {"a": 1, "<b>": 2, "c": float("inf")}
    notes.fault = ToolResponse(text="\u00e9" * 10_000_000, metrics=metrics)
    outcome = await session.execute("notes", {"text": "a"})
    assert outcome.metrics == {"a": 1.0}
    assert outcome.answer == "\u00e9" * MAX_RESPONSE_CHARS + "... [cut]"


async def test_no_names_mean_all_tools_and_none_means_a_name_is_absent():
    session, _ = new_session()
    await session.create({})
    assert (await session.execute("plain", {"x": "1"})).status is ToolStatus.ok
    session, _ = new_session()
    await session.create({"notes": {"create_kwargs": None}, "plain": None})
    assert (await session.execute("plain", {"x": "1"})).status is ToolStatus.user_error
    assert (await session.execute("notes", {"text": "a"})).status is ToolStatus.ok


@pytest.mark.parametrize(
    ("tools_kwargs", "name", "got"),
    [
        pytest.param({"nots": {}}, "tools_kwargs", "nots", id="tool"),
        pytest.param({"notes": {"create": {}}}, "tools_kwargs['notes']", ["create"], id="key"),
    ],
)
async def test_unknown_names_are_errors_of_the_data(tools_kwargs, name, got):
    with pytest.raises(InputError) as caught:
        await new_session()[0].create(tools_kwargs)
    assert (caught.value.name, caught.value.got) == (name, got)


async def test_forks_diverge():
    session, notes = new_session()
    await session.create({})
    await session.execute("notes", {"text": "a"})
    child = await session.fork()
    assert (await child.execute("notes", {"text": "b"})).answer == "a,b"
    assert (await session.execute("notes", {"text": "c"})).answer == "a,c"
    assert await session.calc_reward() == {"notes": 2.0}
    await session.release()
    assert (await child.execute("notes", {"text": "d"})).answer == "a,b,d"
    await child.release()
    assert [state for state, _ in notes.released] == [("a", "c"), ("a", "b", "d")]
    state = object()
    assert await Plain().fork(state) is state


def fragile_session(step, how):
    fragile, before = Fragile(step, how), Fragile()
    before.name = "before"
    toolkit = ToolKit(
        [before, fragile], limits=SessionLimits(lifecycle_timeout_s=0.1, queue_timeout_s=0.1)
    )
    return toolkit.open_session(), fragile, before


async def live(session):
    await session.create({})
    try:
        await session.execute("fragile", {"x": "a"})
        child = await session.fork()
        try:
            await session.calc_reward()
        finally:
            await child.release()
    finally:
        await session.release()


@pytest.mark.parametrize("step", LIFE)
@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_a_fault_at_any_step_is_typed_in_time_and_leaves_nothing_open(step, how):
    session, fragile, before = fragile_session(step, how)
    with pytest.raises(ToolSessionError) as caught:
        await live(session)
    outcome = caught.value.outcome
    assert (outcome.tool, outcome.status) == ("fragile", INFRA_ERROR)
    why = "OSError: no disk" if how == "fail" else "not done within 0.1 s"
    assert outcome.answer == f"{step}: {why}"
    assert (before.num_open, fragile.num_open) == (0, 0)


@pytest.mark.parametrize("step", [*LIFE, "execute"])
async def test_cancellation_at_any_step_leaves_nothing_open(step):
    session, fragile, before = fragile_session(step, "gate")
    task = asyncio.create_task(live(session))
    await asyncio.wait_for(fragile.entered.wait(), 300)
    task.cancel()
    fragile.gate.set()  # what waited may still come to its result
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert (before.num_open, fragile.num_open) == (0, 0)


@pytest.mark.parametrize("end", ["deadline", "cancellation"])
async def test_a_state_that_comes_too_late_is_released(end):
    session, fragile, _ = fragile_session("", "")

    async def create(kwargs):
        """Ignores cancellation until the gate opens."""
        fragile.num_open += 1
        fragile.entered.set()
        while not fragile.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await fragile.gate.wait()
        return {}

    fragile.create = create
    task = asyncio.create_task(session.create({}))
    await asyncio.wait_for(fragile.entered.wait(), 300)
    if end == "cancellation":
        task.cancel()
    with pytest.raises(ToolSessionError if end == "deadline" else asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert fragile.num_open == 1
    fragile.gate.set()
    async with asyncio.timeout(60):
        while fragile.num_open:
            await asyncio.sleep(0.005)


async def test_a_state_that_is_made_as_its_caller_is_cancelled_is_released():
    session, fragile, _ = fragile_session("create", "gate")
    task = asyncio.create_task(session.create({}))
    await asyncio.wait_for(fragile.entered.wait(), 300)
    fragile.gate.set()
    await asyncio.sleep(0)
    assert fragile.num_open == 1 and not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fragile.num_open == 0


async def test_a_reward_is_a_finite_number():
    session, _ = new_session()
    await session.create({"notes": {"calc_reward_kwargs": {"each": float("nan")}}})
    await session.execute("notes", {"text": "a"})
    with pytest.raises(ToolSessionError) as caught:
        await session.calc_reward()
    assert caught.value.outcome.tool == "notes"


class Counting(Tool):
    """Records how many calls ran at once and in which order; has a state where `stateful`."""

    name = "counting"
    text_argument = "x"

    def __init__(self, *, stateful=False, run_s=0.01):
        self.stateful, self.run_s = stateful, run_s
        self.running, self.max_running, self.order = 0, 0, []

    async def create(self, kwargs):
        return [] if self.stateful else None

    async def execute(self, state, arguments, kwargs):
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await asyncio.sleep(self.run_s)
        self.running -= 1
        self.order.append(arguments["x"])
        return ToolResponse(text=arguments["x"])


async def test_a_limit_holds_over_sessions_and_waiting_costs_no_deadline():
    tool = Counting(run_s=0.05)
    tool.timeout_s, tool.max_concurrent = 0.15, 2
    toolkit = ToolKit([tool])
    sessions = [toolkit.open_session() for _ in range(10)]
    for session in sessions:
        await session.create({})
    outcomes = await asyncio.gather(*(s.execute("counting", {"x": "a"}) for s in sessions))
    assert tool.max_running == 2
    assert {outcome.status for outcome in outcomes} == {ToolStatus.ok}
    assert max(outcome.queue_s for outcome in outcomes) == pytest.approx(0.2, abs=1e-3)
    assert max(outcome.latency_s for outcome in outcomes) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize(("stateful", "max_running"), [(True, 1), (False, 3)])
async def test_calls_on_one_state_take_turns_and_others_run_at_once(stateful, max_running):
    tool = Counting(stateful=stateful)
    session = ToolKit([tool]).open_session()
    await session.create({})
    outcomes = await asyncio.gather(*(session.execute("counting", {"x": x}) for x in "abc"))
    assert [outcome.answer for outcome in outcomes] == tool.order == ["a", "b", "c"]
    assert tool.max_running == max_running


async def test_a_call_that_waits_for_slots_of_the_policys_own_calls_is_its_own_error():
    tool = Counting(run_s=1.0)
    tool.max_concurrent = 1
    toolkit = ToolKit([tool], limits=SessionLimits(queue_timeout_s=0.1))
    session, other = toolkit.open_session(), toolkit.open_session()
    for opened in (session, other):
        await opened.create({})
    running = asyncio.create_task(session.execute("counting", {"x": "a"}))
    await asyncio.sleep(0)
    outcomes = [await opened.execute("counting", {"x": "b"}) for opened in (session, other)]
    assert [outcome.status for outcome in outcomes] == [ToolStatus.timeout, INFRA_ERROR]
    assert (await running).status is ToolStatus.ok


async def test_waits_for_the_run_are_reported_while_no_call_runs():
    tool = Counting(run_s=1.0)
    tool.max_concurrent = 1
    toolkit = ToolKit([tool])
    session, other, changes = toolkit.open_session(), toolkit.open_session(), []
    session.watch_waits(lambda waits: changes.append((now_s() - start_s, waits)))
    start_s = now_s()
    await session.create({})
    await other.create({})
    changes.clear()
    first = asyncio.create_task(other.execute("counting", {"x": "a"}))
    await asyncio.sleep(0)
    await asyncio.gather(*(session.execute("counting", {"x": x}) for x in "bc"))
    await first
    waiting_s = dict.fromkeys((True, False), 0.0)
    for (begin_s, waits), (end_s, _) in itertools.pairwise(changes):
        waiting_s[waits] += end_s - begin_s
    # It waits for the other session, and then its second call for its first, which runs.
    assert waiting_s == {True: pytest.approx(1, abs=1e-3), False: pytest.approx(2, abs=1e-3)}


async def test_waiting_for_a_slot_has_a_bound_of_its_own():
    session, fragile, _ = fragile_session("execute", "gate")
    await session.create({})
    first = asyncio.create_task(session.execute("fragile", {"x": "a"}))
    await fragile.entered.wait()
    other = await session.fork()
    # A policy that waits for an earlier call of its own has made that call.
    own = (session, ToolStatus.timeout, "an earlier call")
    for waiting, status, reason in ((other, INFRA_ERROR, "none of the 1 slots"), own):
        outcome = await waiting.execute("fragile", {"x": "a"})
        assert outcome.status is status and outcome.answer.startswith(reason)
        assert outcome.queue_s == 0.1
    fragile.gate.set()
    assert (await first).status is ToolStatus.ok
    assert (await session.execute("fragile", {"x": "a"})).status is ToolStatus.ok
    await other.release()
    await session.release()
