"""The example of an MCP server: its tools, and a basket of its own for each trajectory."""

from pathlib import Path

import pytest

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.sections.tools import ToolConfig
from mega_agentrl.tool.toolkit import build_toolkit, load_mcp_servers
from mega_agentrl.types.records import ToolStatus
from tests.fakes import CharCodec

PATH = Path(__file__).parents[2] / "examples" / "mcp.json"


@pytest.fixture(scope="module")
def kit():
    config = ToolConfig(mcp=str(PATH))
    servers = load_mcp_servers(config, {})
    return build_toolkit(config, CharCodec(), mcp_servers=servers, protocol=CallProtocol.tags)


async def test_each_trajectory_has_its_own_basket(kit):
    assert kit.names == ("python", "add_to_basket", "total_price")
    tools_kwargs = {"add_to_basket": {}, "total_price": {}}
    first, second = kit.open_session(), kit.open_session()
    await first.create(tools_kwargs)
    await second.create(tools_kwargs)
    (call,) = kit.parse_calls("<add_to_basket>bread</add_to_basket>")
    assert (await first.execute(call.tool, call.arguments)).answer == "1 bread"
    assert (await first.execute(call.tool, {"item": "bread", "count": 1})).answer == "2 bread"
    wrong = await first.execute("add_to_basket", {"item": "gold"})
    assert (wrong.status, "no gold" in wrong.answer) == (ToolStatus.user_error, True)
    fork = await first.fork()
    await fork.execute("add_to_basket", {"item": "apple"})
    prices = [(await one.execute("total_price", {})).answer for one in (first, fork, second)]
    assert prices == ["8", "10", "0"]
    for session in (first, fork, second):
        await session.release()
