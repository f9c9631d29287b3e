"""A trajectory's tools: lifecycle, typed outcomes, forks."""

import asyncio

import pytest

from mega_agentrl.tool.outcomes import OutcomeCounter
from mega_agentrl.tool.protocol import Tool, ToolAnswer
from mega_agentrl.tool.session import TrajectoryTools
from mega_agentrl.types.records import ToolStatus


class Notes(Tool):
    """Remembers what it was told; some texts make it fail."""

    name = "notes"
    argument = "text"
    deadline_s = 0.2

    def __init__(self):
        self.released = []

    async def create(self, kwargs):
        return list(kwargs.get("start", []))

    async def execute(self, state, arguments, kwargs):
        text = arguments["text"]
        if text == "hang":
            await asyncio.sleep(30)
        if text == "bad":
            raise ValueError("bad text")
        if text == "bug":
            raise KeyError("bug")
        if text == "inner timeout":
            raise TimeoutError("backend")
        state.append(text)
        return ToolAnswer(text=",".join(state), step_reward=kwargs.get("reward", 0.0))

    async def fork(self, state):
        return list(state)

    async def calc_reward(self, state, kwargs):
        return len(state) * kwargs.get("each", 1.0)

    async def release(self, state, kwargs):
        self.released.append((tuple(state), dict(kwargs)))


class Plain(Tool):
    name = "plain"
    argument = "x"

    async def execute(self, state, arguments, kwargs):
        return ToolAnswer(text=str(state))


def new_session():
    notes = Notes()
    counter = OutcomeCounter()
    return TrajectoryTools({"notes": notes, "plain": Plain()}, counter), notes, counter


async def test_kwargs_reach_each_step_of_the_life():
    session, notes, counter = new_session()
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
    assert counter.metrics()["tool/notes/num_ok"] == 1


@pytest.mark.parametrize(
    ("text", "status", "answer"),
    [
        ("bad", ToolStatus.user_error, "bad text"),
        ("bug", ToolStatus.infra_error, "KeyError: 'bug'"),
        ("hang", ToolStatus.timeout, "Timed out after 0.2 s."),
        ("inner timeout", ToolStatus.infra_error, "TimeoutError: backend"),
    ],
)
async def test_failures_are_typed(text, status, answer):
    session, _, _ = new_session()
    await session.create({})
    outcome = await session.execute("notes", {"text": text})
    assert (outcome.status, outcome.answer) == (status, answer)
    assert (await session.execute("notes", {"text": "a"})).answer == "a"


async def test_what_the_policy_gets_wrong_is_its_own_error():
    session, _, _ = new_session()
    await session.create({"plain": {}})
    for tool, arguments in (("notes", {"text": "a"}), ("nothing", {}), ("plain", {"y": 1})):
        outcome = await session.execute(tool, arguments)
        assert outcome.status is ToolStatus.user_error
        assert tool in outcome.answer


async def test_cancellation_is_passed_on():
    session, notes, _ = new_session()
    notes.deadline_s = None
    await session.create({})
    running = asyncio.create_task(session.execute("notes", {"text": "hang"}))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_empty_means_all_and_none_means_absent():
    session, _, _ = new_session()
    await session.create({})
    assert (await session.execute("plain", {"x": 1})).status is ToolStatus.ok
    session, _, _ = new_session()
    await session.create({"notes": {"create_kwargs": None}, "plain": None})
    assert (await session.execute("plain", {"x": 1})).status is ToolStatus.user_error
    assert (await session.execute("notes", {"text": "a"})).status is ToolStatus.ok


async def test_unknown_names_are_errors_of_the_data():
    session, _, _ = new_session()
    with pytest.raises(ValueError, match=r"'nots', expected one of \['notes', 'plain'\]"):
        await session.create({"nots": {}})
    with pytest.raises(ValueError, match=r"\['create'\].*create_kwargs"):
        await session.create({"notes": {"create": {}}})


async def test_forks_diverge():
    session, notes, _ = new_session()
    await session.create({})
    await session.execute("notes", {"text": "a"})
    child = await session.fork()
    assert (await child.execute("notes", {"text": "b"})).answer == "a,b"
    assert (await session.execute("notes", {"text": "c"})).answer == "a,c"
    await session.release()
    assert (await child.execute("notes", {"text": "d"})).answer == "a,b,d"
    await child.release()
    assert [state for state, _ in notes.released] == [("a", "c"), ("a", "b", "d")]
