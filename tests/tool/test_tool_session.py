"""A trajectory's tools: lifecycle, typed outcomes, limits and forks; nothing is left open."""

import asyncio
import contextlib

import pytest

from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.session import MAX_RESPONSE_CHARS, SessionLimits
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolStatus


class Notes(Tool):
    """Remembers what it was told; some texts make it fail."""

    name = "notes"
    text_argument = "text"
    timeout_s = 0.2

    def __init__(self):
        self.num_run = 0
        self.released = []

    async def create(self, kwargs):
        return list(kwargs.get("start", []))

    async def execute(self, state, arguments, kwargs):
        text = arguments["text"]
        self.num_run += 1
        if text == "hang":
            await asyncio.sleep(30)
        if text == "bad":
            raise ValueError("bad text")
        if text == "bug":
            raise KeyError("bug")
        if text == "inner timeout":
            raise TimeoutError("backend")
        if text == "no answer":
            return text
        if text == "no number":
            return ToolResponse(text="", step_reward=float("nan"))
        state.append(text)
        return ToolResponse(text=",".join(state), step_reward=kwargs.get("reward", 0.0))

    async def fork(self, state):
        return list(state)

    async def calc_reward(self, state, kwargs):
        return len(state) * kwargs.get("each", 1.0)

    async def release(self, state, kwargs):
        self.released.append((tuple(state), dict(kwargs)))


class Plain(Tool):
    name = "plain"
    text_argument = "x"

    async def execute(self, state, arguments, kwargs):
        return ToolResponse(text=str(state), metrics={"a": 1, "<b>": 2, "c": float("inf")})


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


@pytest.mark.parametrize(
    ("text", "status", "answer"),
    [
        ("bad", ToolStatus.user_error, "bad text"),
        ("bug", ToolStatus.infra_error, "KeyError: 'bug'"),
        ("hang", ToolStatus.timeout, "Timed out after 0.2 s."),
        ("inner timeout", ToolStatus.infra_error, "TimeoutError: backend"),
        (
            "no answer",
            ToolStatus.infra_error,
            "TypeError: execute returned str, expected a ToolResponse with text",
        ),
        (
            "no number",
            ToolStatus.infra_error,
            "TypeError: step_reward is nan, expected a finite number",
        ),
    ],
)
async def test_failures_are_typed_and_run_once(text, status, answer):
    session, notes = new_session()
    await session.create({})
    outcome = await session.execute("notes", {"text": text})
    assert (outcome.status, outcome.answer) == (status, answer)
    assert notes.num_run == 1
    assert (await session.execute("notes", {"text": "a"})).answer == "a"


async def test_what_the_policy_gets_wrong_is_its_own_error():
    session, notes = new_session()
    await session.create({"notes": {}})
    for tool, arguments in (
        ("plain", {"x": "a"}),
        ("nothing", {}),
        ("notes", {"y": "1"}),
        ("notes", {"text": 3}),
        ("notes", {"text": "a", "more": 1}),
    ):
        outcome = await session.execute(tool, arguments)
        assert outcome.status is ToolStatus.user_error
        assert tool in outcome.answer
    assert notes.num_run == 0


async def test_metrics_that_cannot_be_written_are_dropped():
    session, _ = new_session()
    await session.create({})
    assert (await session.execute("plain", {"x": "a"})).metrics == {"a": 1.0}


async def test_cancellation_is_passed_on():
    session, notes = new_session()
    notes.timeout_s = None
    await session.create({})
    running = asyncio.create_task(session.execute("notes", {"text": "hang"}))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_empty_means_all_and_none_means_absent():
    session, _ = new_session()
    await session.create({})
    assert (await session.execute("plain", {"x": "1"})).status is ToolStatus.ok
    session, _ = new_session()
    await session.create({"notes": {"create_kwargs": None}, "plain": None})
    assert (await session.execute("plain", {"x": "1"})).status is ToolStatus.user_error
    assert (await session.execute("notes", {"text": "a"})).status is ToolStatus.ok


async def test_unknown_names_are_errors_of_the_data():
    session, _ = new_session()
    with pytest.raises(ValueError, match=r"'nots', expected one of \['notes', 'plain'\]"):
        await session.create({"nots": {}})
    with pytest.raises(ValueError, match=r"\['create'\].*create_kwargs"):
        await session.create({"notes": {"create": {}}})


async def test_forks_diverge():
    session, notes = new_session()
    await session.create({})
    await session.execute("notes", {"text": "a"})
    child = await session.fork()
    assert (await child.execute("notes", {"text": "b"})).answer == "a,b"
    assert (await session.execute("notes", {"text": "c"})).answer == "a,c"
    await session.release()
    assert (await child.execute("notes", {"text": "d"})).answer == "a,b,d"
    await child.release()
    assert [state for state, _ in notes.released] == [("a", "c"), ("a", "b", "d")]


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
    assert (outcome.tool, outcome.status) == ("fragile", ToolStatus.infra_error)
    why = "OSError: no disk" if how == "fail" else "not done within 0.1 s"
    assert outcome.answer == f"{step}: {why}"
    assert (before.num_open, fragile.num_open) == (0, 0)


@pytest.mark.parametrize("step", [*LIFE, "execute"])
async def test_cancellation_at_any_step_leaves_nothing_open(step):
    session, fragile, before = fragile_session(step, "gate")
    task = asyncio.create_task(live(session))
    await asyncio.wait_for(fragile.entered.wait(), 60)
    task.cancel()
    fragile.gate.set()  # what waited may still come to its result
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert (before.num_open, fragile.num_open) == (0, 0)


async def test_a_state_that_comes_too_late_is_released():
    session, fragile, _ = fragile_session("", "")

    async def deaf(kwargs):
        fragile.num_open += 1
        while not fragile.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await fragile.gate.wait()
        return {}

    fragile.create = deaf
    with pytest.raises(ToolSessionError, match="create: not done within"):
        await session.create({})
    assert fragile.num_open == 1
    fragile.gate.set()
    async with asyncio.timeout(60):
        while fragile.num_open:
            await asyncio.sleep(0.005)


async def test_a_reward_is_a_finite_number():
    session, _ = new_session()
    await session.create({"notes": {"calc_reward_kwargs": {"each": float("nan")}}})
    await session.execute("notes", {"text": "a"})
    with pytest.raises(ToolSessionError, match="calc_reward: got nan, expected a finite number"):
        await session.calc_reward()


async def test_a_limit_holds_over_sessions_and_waiting_costs_no_deadline():
    class Slow(Tool):
        name = "slow"
        text_argument = "x"
        timeout_s = 0.15
        max_concurrent = 2
        running = most = 0

        async def execute(self, state, arguments, kwargs):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.05)
            self.running -= 1
            return ToolResponse(text="")

    slow = Slow()
    toolkit = ToolKit([slow])
    sessions = [toolkit.open_session() for _ in range(10)]
    for session in sessions:
        await session.create({})
    outcomes = await asyncio.gather(*(s.execute("slow", {"x": "a"}) for s in sessions))
    assert slow.most == 2
    assert {outcome.status for outcome in outcomes} == {ToolStatus.ok}
    assert max(outcome.queue_s for outcome in outcomes) > 0.15
    assert max(outcome.latency_s for outcome in outcomes) < 0.15


async def test_waiting_for_a_slot_has_a_bound_of_its_own():
    session, fragile, _ = fragile_session("execute", "gate")
    await session.create({})
    first = asyncio.create_task(session.execute("fragile", {"x": "a"}))
    await fragile.entered.wait()
    other = await session.fork()
    outcome = await other.execute("fragile", {"x": "a"})
    assert outcome.status is ToolStatus.infra_error
    assert outcome.answer == "none of the 1 slots became free in 0.1 s"
    await other.release()
    outcome = await session.execute("fragile", {"x": "a"})
    assert outcome.status is ToolStatus.infra_error
    assert outcome.answer == "an earlier call was not done within 0.1 s"
    fragile.gate.set()
    assert (await first).status is ToolStatus.ok
    assert (await session.execute("fragile", {"x": "a"})).status is ToolStatus.ok
    await session.release()


class Turns(Tool):
    """Keeps what ran at once; with a state where `stateful`."""

    name = "turns"
    text_argument = "x"

    def __init__(self, stateful):
        self.stateful, self.running, self.most, self.order = stateful, 0, 0, []

    async def create(self, kwargs):
        return [] if self.stateful else None

    async def execute(self, state, arguments, kwargs):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        self.order.append(arguments["x"])
        return ToolResponse(text=arguments["x"])


@pytest.mark.parametrize(("stateful", "most"), [(True, 1), (False, 3)])
async def test_calls_on_one_state_take_turns_and_others_run_at_once(stateful, most):
    tool = Turns(stateful)
    session = ToolKit([tool]).open_session()
    await session.create({})
    outcomes = await asyncio.gather(*(session.execute("turns", {"x": x}) for x in "abc"))
    assert [outcome.answer for outcome in outcomes] == tool.order == ["a", "b", "c"]
    assert tool.most == most
    await session.release()


async def test_ten_megabytes_are_cut_before_anybody_looks_at_them():
    class Large(Turns):
        async def execute(self, state, arguments, kwargs):
            return ToolResponse(text="\u00e9" * 10_000_000)

    session = ToolKit([Large(False)]).open_session()
    await session.create({})
    answer = (await session.execute("turns", {"x": ""})).answer
    assert len(answer) == MAX_RESPONSE_CHARS + len("... [cut]") and answer.endswith("... [cut]")


async def test_only_malformed_calls_are_invalid_calls():
    session, _, _ = fragile_session("execute", "fail")
    await session.create({})
    for name, arguments, expected in (
        ("fragile", {"x": "a"}, False),
        ("fragile", {"y": "a"}, True),
        ("none", {}, True),
    ):
        assert (await session.execute(name, arguments)).is_invalid_call is expected
    await session.release()
