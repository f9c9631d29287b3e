"""Calls of MCP tools, forks, timeouts and restarts; the servers have no process of their own."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from mega_agentrl.tool.mcp import server
from mega_agentrl.tool.mcp.connection import McpConnection
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolStatus
from tests.tool.mcp.example_server import PNG
from tests.tool.mcp.servers import answer, in_memory, list_example, opened, started_toolkit


@pytest.fixture(autouse=True)
def _in_memory():
    with in_memory():
        yield


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return list_example(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return list_example(tmp_path_factory.mktemp("shared"), per_trajectory=False)


async def test_every_kind_of_answer_becomes_an_outcome(listed):
    async with started_toolkit(listed) as kit, opened(kit) as session:
        outcome = await session.execute("picture", {})
        assert (outcome.status, outcome.images) == (ToolStatus.ok, (PNG,))
        assert outcome.answer == "a picture\na note"
        outcome = await session.execute("add", {"amount": -1})
        assert (outcome.status, outcome.answer) == (ToolStatus.user_error, "below zero")
        outcome = await session.execute("add", {"amount": "many"})
        assert outcome.is_invalid_call
        outcome = await session.execute("refuse", {})
        assert (outcome.status, outcome.answer) == (ToolStatus.user_error, "no such row")
        assert len(await answer(session, "flood", length=100_000)) <= 200
        assert "</result>" not in await answer(session, "close_tags")
        assert await answer(session, "total") == "-1"


async def test_a_model_of_text_reads_a_note_for_an_image(listed):
    async with started_toolkit(listed, shows_images=False) as kit, opened(kit) as session:
        outcome = await session.execute("picture", {})
        assert (outcome.answer, outcome.images) == ("a picture\n[image/png not shown]\na note", ())


async def test_each_trajectory_has_its_own_state_and_a_fork_continues_from_it(listed):
    async with started_toolkit(listed) as kit, opened(kit) as first, opened(kit) as second:
        assert await answer(first, "add", amount=3) == "3"
        assert await answer(second, "add", amount=10) == "10"
        assert await answer(first, "total") == "3"
        fork = await first.fork()
        assert await answer(fork, "add", amount=1) == "4"
        assert await answer(first, "add", amount=5) == "8"
        grandchild = await fork.fork()
        assert await answer(grandchild, "total") == "4"
        await grandchild.release()
        await fork.release()


async def test_a_fork_whose_calls_are_answered_otherwise_fails_alone(listed):
    async with started_toolkit(listed) as kit, opened(kit) as session:
        await session.execute("add", {"amount": 1})
        await session.execute("clock", {})
        with pytest.raises(ToolSessionError) as caught:
            await session.fork()
        assert "call 2 (clock) was answered otherwise" in caught.value.outcome.answer
        assert await answer(session, "total") == "1"


async def test_calls_with_effects_outside_of_the_sandbox_are_not_repeated(tmp_path):
    listed = await asyncio.to_thread(list_example, tmp_path, network="host")
    async with started_toolkit(listed) as kit, opened(kit) as session:
        await session.execute("total", {})  # it changes nothing, as the server says
        await (await session.fork()).release()
        await session.execute("add", {"amount": 1})
        with pytest.raises(ToolSessionError) as caught:
            await session.fork()
        assert "calls are only repeated in a sandbox without network" in caught.value.outcome.answer


async def test_a_slow_call_times_out_and_the_server_goes_on(listed):
    async with started_toolkit(listed) as kit, opened(kit) as session:
        await session.execute("add", {"amount": 1})
        assert (await session.execute("wait", {})).status is ToolStatus.timeout
        assert await answer(session, "total") == "1"
        with pytest.raises(ToolSessionError) as caught:
            await session.fork()
        assert "a call of wait was not answered" in caught.value.outcome.answer


@pytest.mark.parametrize(
    ("tool", "status", "cause"),
    [
        pytest.param("hang", ToolStatus.timeout, "and none to a ping", id="hang"),
        pytest.param("die", ToolStatus.user_error, "the server closed the connection", id="death"),
    ],
)
async def test_a_policy_that_ends_its_own_server_is_not_left_out(listed, tool, status, cause):
    async with started_toolkit(listed) as kit, opened(kit) as session, opened(kit) as other:
        assert await answer(other, "total") == "0"
        outcome = await session.execute(tool, {})
        assert (outcome.status, cause in outcome.answer) == (status, True)
        assert (await session.execute("total", {})).status is ToolStatus.user_error
        assert await answer(other, "total") == "0"


@pytest.mark.parametrize("tool", ["hang", "die", "break_down"])
async def test_a_server_that_has_never_answered_is_an_error_of_the_run(listed, tool):
    async with started_toolkit(listed) as kit, opened(kit) as session:
        assert (await session.execute(tool, {})).status is ToolStatus.infra_error


@pytest.mark.parametrize("kind", ["own", "shared"])
async def test_an_error_of_the_protocol_is_the_policys_while_the_server_answers_others(
    listed, shared, kind, monkeypatch
):
    which = listed if kind == "own" else shared
    async with started_toolkit(which) as kit, opened(kit) as session, opened(kit) as other:
        assert await answer(other, "total") == "0"
        outcome = await session.execute("break_down", {})
        assert (outcome.status, "out of order" in outcome.answer) == (ToolStatus.user_error, True)
        monkeypatch.setattr(server, "ANSWER_PROOF_S", 0.0)
        assert (await session.execute("break_down", {})).status is ToolStatus.infra_error


async def test_a_shared_server_is_started_once_and_again_after_it_died(shared):
    async with started_toolkit(shared) as kit, opened(kit) as first, opened(kit) as second:
        assert await answer(first, "add", amount=3) == "3"
        assert await answer(second, "add", amount=4) == "7"
        assert await answer(await first.fork(), "total") == "7"
        waiting = asyncio.create_task(first.execute("wait", {}))
        outcome = await second.execute("die", {})
        assert outcome.status is ToolStatus.user_error
        assert "the server closed the connection" in outcome.answer
        assert (await waiting).status is ToolStatus.user_error
        assert await answer(second, "total") == "0"


async def test_a_shared_server_that_a_call_ends_each_time_masks_nobody_and_stays_for_others(shared):
    async with started_toolkit(shared) as kit, opened(kit) as good, opened(kit) as bad:
        assert await answer(good, "add", amount=3) == "3"
        for _ in range(server.MAX_RESTARTS + 3):
            assert (await bad.execute("die", {})).status is ToolStatus.user_error
        assert await answer(good, "total") == "0"


async def test_a_shared_server_that_cannot_be_started_again_fails_only_who_has_not_lost_it(shared):
    async with (
        started_toolkit(shared) as kit,
        opened(kit) as bad,
        opened(kit) as waiting,
        opened(kit) as good,
    ):
        assert await answer(good, "add", amount=3) == "3"
        in_flight = asyncio.create_task(waiting.execute("wait", {}))
        await asyncio.sleep(0)
        assert (await bad.execute("die", {})).status is ToolStatus.user_error
        assert (await in_flight).status is ToolStatus.user_error
        fork = await bad.fork()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(McpConnection, "_transport", _unreachable)
            for _ in range(server.MAX_RESTARTS + 2):
                outcomes = [await s.execute("total", {}) for s in (bad, fork, waiting, good)]
                statuses = [outcome.status for outcome in outcomes]
                assert statuses == [*[ToolStatus.user_error] * 3, ToolStatus.infra_error]
        assert "not started again" in outcomes[-1].answer
        await fork.release()


@asynccontextmanager
async def _unreachable(connection):
    raise OSError("connection refused")
    yield


async def test_calls_of_a_trajectory_on_a_shared_server_run_at_the_same_time(shared):
    async with started_toolkit(shared) as kit, opened(kit) as session:
        slow = asyncio.create_task(session.execute("wait", {}))
        await asyncio.sleep(0)
        assert await answer(session, "total") == "0"
        assert not slow.done()
        slow.cancel()


async def test_restarts_before_any_answer_are_bounded(shared):
    async with started_toolkit(shared) as kit, opened(kit) as session:
        outcomes = [await session.execute("die", {}) for _ in range(server.MAX_RESTARTS + 3)]
    assert all(outcome.status is ToolStatus.infra_error for outcome in outcomes)
    num_started = sum("closed the connection" in outcome.answer for outcome in outcomes)
    assert num_started == server.MAX_RESTARTS + 1
    assert "not started again" in outcomes[-1].answer
