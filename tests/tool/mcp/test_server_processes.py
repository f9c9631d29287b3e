"""MCP servers that are real processes: how they start, fail and end, and what they may write."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.mcp import server
from mega_agentrl.tool.mcp.listing import list_servers
from mega_agentrl.types.records import ToolStatus
from tests.tool.mcp.example_server import PNG
from tests.tool.mcp.servers import (
    SECRET,
    VARIABLES,
    answer,
    http_server,
    list_example,
    opened,
    started_toolkit,
    write_servers,
)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return list_example(tmp_path_factory.mktemp("own"), env={"TOKEN": "${EXAMPLE_TOKEN}"})


async def test_a_server_that_dies_is_lost_for_its_trajectory_only_and_its_secrets_are_hidden(
    listed, caplog
):
    async with started_toolkit(listed) as kit, opened(kit) as session, opened(kit) as other:
        assert await answer(session, "showToken") == "[hidden]"
        outcome = await session.execute("die", {})
        assert outcome.status is ToolStatus.user_error
        assert "giving up on [hidden]" in outcome.answer
        assert (await session.execute("total", {})).status is ToolStatus.user_error
        assert await answer(other, "total") == "0"
    assert SECRET not in caplog.text + repr(listed)


@pytest.mark.extended
async def test_a_server_that_hangs_is_lost_for_its_trajectory_only(listed, monkeypatch):
    monkeypatch.setattr(server, "_PING_TIMEOUT_S", 0.5)
    impatient = replace(listed, config=replace(listed.config, timeout_s=5.0))
    async with started_toolkit(impatient) as kit, opened(kit) as session, opened(kit) as other:
        assert await answer(other, "total") == "0"  # the first call imports
        outcome = await session.execute("hang", {})
        assert (outcome.status, "ping" in outcome.answer) == (ToolStatus.timeout, True)
        assert (await session.execute("total", {})).status is ToolStatus.user_error
        assert await answer(other, "total") == "0"


@pytest.mark.extended
async def test_an_answer_that_is_too_long_fails_its_call_only(listed):
    async with started_toolkit(listed, shows_images=False) as kit, opened(kit) as session:
        assert await answer(session, "add", amount=3) == "3"
        outcome = await session.execute("flood", {"length": 4 << 20})
        assert (outcome.status, "1 MiB" in outcome.answer) == (ToolStatus.user_error, True)
        assert await answer(session, "total") == "3"


@pytest.mark.extended
async def test_a_shared_server_is_started_again_after_it_died(listed):
    shared = replace(listed, config=replace(listed.config, per_trajectory=False))
    async with started_toolkit(shared) as kit, opened(kit) as first, opened(kit) as second:
        assert await answer(first, "add", amount=3) == "3"
        waiting = asyncio.create_task(first.execute("wait", {}))
        for _ in range(2):
            assert (await second.execute("die", {})).status is ToolStatus.user_error
        assert (await waiting).status is ToolStatus.user_error
        assert await answer(second, "total") == "0"
        connection = kit._tools["total"].tool._server._shared
        os.kill(connection._process.pid, signal.SIGKILL)
        while not connection.is_lost:
            await asyncio.sleep(0.01)
        assert await answer(first, "total") == "0", "it died between two calls"


@pytest.mark.extended
async def test_a_shared_server_that_hangs_in_a_call_masks_nobody(listed, monkeypatch):
    monkeypatch.setattr(server, "_PING_TIMEOUT_S", 0.5)
    config = replace(listed.config, per_trajectory=False, timeout_s=5.0)
    async with (
        started_toolkit(replace(listed, config=config)) as kit,
        opened(kit) as first,
        opened(kit) as second,
    ):
        assert await answer(first, "add", amount=3) == "3"
        hanging, stuck = await asyncio.gather(
            first.execute("hang", {}), second.execute("total", {})
        )
        assert hanging.status is ToolStatus.timeout
        assert stuck.status is not ToolStatus.infra_error
        assert await answer(second, "total") == "0"


async def test_noise_between_the_messages_is_ignored_and_no_server_is_left_behind(listed):
    script = 'echo ready; echo \'{"no": "message"}\'; exec python example_server.py'
    noisy = replace(listed, config=replace(listed.config, command=("sh", "-c", script)))
    async with started_toolkit(noisy) as kit:
        session = kit.open_session()
        await session.create({})
        open_connections = kit._tools["total"].tool._server._open_connections
        assert not open_connections, "a server is started by the first call"
        assert await answer(session, "add", amount=2) == "2"
        (one,) = open_connections
        pid = one._process.pid
        os.kill(pid, 0)
        kit.close_now()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope="module")
def url():
    with http_server() as url:
        yield url


def test_a_shared_server_answers_over_streamable_http(url, tmp_path):
    headers = {"Authorization": "Bearer ${EXAMPLE_TOKEN}"}
    (listed,) = list_servers(
        write_servers(tmp_path, web={"url": url, "headers": headers}), VARIABLES
    )

    async def use():
        async with started_toolkit(listed) as kit, opened(kit) as first, opened(kit) as second:
            assert await answer(first, "add", amount=3) == "3"
            assert await answer(second, "add", amount=4) == "7"
            assert (await second.execute("picture", {})).images == (PNG,)

    asyncio.run(use())


def test_a_refused_header_is_not_shown(url, tmp_path):
    entry = {"url": url, "headers": {"Authorization": "Bearer ${OTHER}"}}
    with pytest.raises(ConfigError) as caught:
        list_servers(write_servers(tmp_path, web=entry), {"OTHER": "wrong-token"})
    assert caught.value.key.endswith("server web")
    assert caught.value.got == url
    assert "wrong-token" not in str(caught.value)


@pytest.mark.extended
@pytest.mark.parametrize("per_trajectory", [False, True], ids=["shared", "own_session"])
def test_a_server_over_streamable_http_that_dies_is_lost_or_asked_again(tmp_path, per_trajectory):
    with http_server() as url:
        headers = {"Authorization": "Bearer ${EXAMPLE_TOKEN}"}
        entry = {"url": url, "headers": headers, "per_trajectory": per_trajectory}
        (listed,) = list_servers(write_servers(tmp_path, web=entry), VARIABLES)

        async def use():
            async with started_toolkit(listed) as kit, opened(kit) as first, opened(kit) as second:
                assert await answer(first, "add", amount=3) == "3"
                assert await answer(second, "add", amount=4) == "7"
                assert (await first.execute("die", {})).status is ToolStatus.user_error
                assert (await first.execute("total", {})).status is ToolStatus.user_error
                expected = ToolStatus.user_error if per_trajectory else ToolStatus.infra_error
                assert (await second.execute("total", {})).status is expected

        asyncio.run(use())
