"""Calls of tools of real MCP servers, and what becomes of servers that fail."""

import asyncio
import os

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.mcp import connection, server
from mega_agentrl.tool.mcp.listing import list_servers
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolStatus
from tests.tool.mcp.example_server import PNG
from tests.tool.mcp.servers import (
    SECRET,
    VARIABLES,
    http_server,
    list_example,
    opened,
    started_toolkit,
    write_servers,
)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return list_example(tmp_path_factory.mktemp("own"), env={"TOKEN": "${EXAMPLE_TOKEN}"})


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """The example with a short limit of a call."""
    return list_example(tmp_path_factory.mktemp("impatient"), timeout_s=3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return list_example(tmp_path_factory.mktemp("shared"), per_trajectory=False)


async def answer(session, tool, **arguments):
    return (await session.execute(tool, arguments)).answer


async def test_every_kind_of_answer(listed):
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
        outcome = await session.execute("break_down", {})
        assert (outcome.status, "out of order" in outcome.answer) == (ToolStatus.infra_error, True)
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
        with pytest.raises(ToolSessionError, match=r"call 2 \(clock\)"):
            await session.fork()
        assert await answer(session, "total") == "1"


async def test_calls_with_effects_outside_of_the_sandbox_are_not_repeated(tmp_path):
    listed = await asyncio.to_thread(list_example, tmp_path, network="host")
    async with started_toolkit(listed) as kit, opened(kit) as session:
        await session.execute("total", {})  # it changes nothing, as the server says
        await (await session.fork()).release()
        await session.execute("add", {"amount": 1})
        with pytest.raises(ToolSessionError, match="per_trajectory=false"):
            await session.fork()


async def test_a_slow_call_times_out_and_the_server_goes_on(impatient):
    async with started_toolkit(impatient) as kit, opened(kit) as session:
        await session.execute("add", {"amount": 1})
        assert (await session.execute("wait", {})).status is ToolStatus.timeout
        assert await answer(session, "total") == "1"
        with pytest.raises(ToolSessionError, match="wait was not answered"):
            await session.fork()


@pytest.mark.parametrize(
    ("tool", "word"),
    [pytest.param("hang", "ping", id="hang"), pytest.param("die", "giving up", id="death")],
)
async def test_a_lost_server_fails_its_trajectory_only(impatient, monkeypatch, tool, word):
    monkeypatch.setattr(server, "_PING_TIMEOUT_S", 0.5)
    async with started_toolkit(impatient) as kit, opened(kit) as session, opened(kit) as other:
        outcome = await session.execute(tool, {})
        assert (outcome.status, word in outcome.answer) == (ToolStatus.infra_error, True)
        assert (await session.execute("total", {})).status is ToolStatus.infra_error
        assert await answer(other, "total") == "0"


async def test_a_flood_ends_the_session_only(listed, monkeypatch):
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 1 << 20)
    async with started_toolkit(listed) as kit, opened(kit) as session:
        outcome = await session.execute("flood", {"length": 4 << 20})
        assert (outcome.status, "1 MiB" in outcome.answer) == (ToolStatus.infra_error, True)


async def test_secrets_are_not_shown(listed, caplog):
    async with started_toolkit(listed) as kit, opened(kit) as session:
        assert await answer(session, "showToken") == "[hidden]"
        outcome = await session.execute("die", {})
    assert "giving up on [hidden]" in outcome.answer
    assert SECRET not in caplog.text + repr(listed)


async def test_noise_between_the_messages_is_ignored(tmp_path):
    script = 'echo ready; echo \'{"no": "message"}\'; exec python example_server.py'
    changes = {"command": "sh", "args": ["-c", script]}
    listed = await asyncio.to_thread(list_example, tmp_path, **changes)
    async with started_toolkit(listed) as kit, opened(kit) as session:
        assert await answer(session, "add", amount=2) == "2"


async def test_a_shared_server_is_started_once_and_again_after_it_died(shared):
    async with started_toolkit(shared) as kit, opened(kit) as first, opened(kit) as second:
        assert await answer(first, "add", amount=3) == "3"
        assert await answer(second, "add", amount=4) == "7"
        assert await answer(await first.fork(), "total") == "7"
        waiting = asyncio.create_task(first.execute("wait", {}))
        assert (await second.execute("die", {})).status is ToolStatus.infra_error
        assert (await waiting).status is ToolStatus.infra_error
        assert await answer(second, "total") == "0"


async def test_restarts_without_an_answer_are_bounded(shared):
    async with started_toolkit(shared) as kit, opened(kit) as session:
        outcomes = [await session.execute("die", {}) for _ in range(server.MAX_RESTARTS + 3)]
    assert all(outcome.status is ToolStatus.infra_error for outcome in outcomes)
    num_started = sum("giving up" in outcome.answer for outcome in outcomes)
    assert num_started == server.MAX_RESTARTS + 1
    assert "not started again" in outcomes[-1].answer


async def test_no_server_is_left_behind(listed):
    async with started_toolkit(listed) as kit:
        session = kit.open_session()
        await session.create({})
        open_connections = kit._tools["total"].tool._server._open_connections
        assert not open_connections, "a server is started by the first call"
        await session.execute("total", {})
        (one,) = open_connections
        pid = one._process.pid
        os.kill(pid, 0)
        kit.close_now()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("per_trajectory", [False, True], ids=["shared", "own_session"])
def test_streamable_http(tmp_path, per_trajectory):
    with http_server() as url:
        headers = {"Authorization": "Bearer ${EXAMPLE_TOKEN}"}
        entry = {"url": url, "headers": headers, "per_trajectory": per_trajectory}
        (listed,) = list_servers(write_servers(tmp_path, web=entry), VARIABLES)

        async def use():
            async with started_toolkit(listed) as kit, opened(kit) as first, opened(kit) as second:
                assert await answer(first, "add", amount=3) == "3"
                assert await answer(second, "add", amount=4) == "7"
                assert (await second.execute("picture", {})).images == (PNG,)
                assert (await first.execute("die", {})).status is ToolStatus.infra_error
                assert (await first.execute("total", {})).status is ToolStatus.infra_error

        asyncio.run(use())


def test_a_refused_header_is_not_shown(tmp_path):
    with http_server() as url:
        entry = {"url": url, "headers": {"Authorization": "Bearer ${OTHER}"}}
        with pytest.raises(ConfigError) as caught:
            list_servers(write_servers(tmp_path, web=entry), {"OTHER": "wrong-token"})
    assert caught.value.key.endswith("server web")
    assert caught.value.got == url
    assert "wrong-token" not in str(caught.value)
