"""The tools of a server before the run: pages, names, choices, and servers that do not start."""

import mcp_types
import pytest
from mcp.server import Server

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import ToolConfig
from mega_agentrl.tool.mcp.listing import choose_names, list_servers
from mega_agentrl.tool.toolkit import build_toolkit, load_mcp_servers
from tests.fakes import CharCodec
from tests.tool.mcp.example_server import TOOLS
from tests.tool.mcp.servers import EXAMPLE, SECRET, in_memory, write_servers


def names(listed):
    return [[tool.name for tool in server.tools] for server in listed]


def test_all_pages_are_read_and_become_function_schemas(tmp_path):
    config = ToolConfig(mcp=write_servers(tmp_path, example=EXAMPLE))
    with in_memory():
        listed = load_mcp_servers(config, {}, protocol=CallProtocol.hermes)
    kit = build_toolkit(config, CharCodec(), mcp_servers=listed, protocol=CallProtocol.hermes)
    assert kit.names == ("python", *(name.replace(".", "_") for name in TOOLS))
    assert kit.schemas(["add"])["add"]["function"] == {
        "name": "add",
        "description": "The tool add.",
        "parameters": TOOLS["add"][1],
    }


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        pytest.param(
            CallProtocol.tags,
            ["one_add", "show_token", "break_down", "srv_2_add", "srv_2_total", "srv_2_answer"],
            id="tags",
        ),
        pytest.param(
            CallProtocol.hermes,
            ["one_add", "showToken", "break_down", "srv_2_add", "srv_2_total", "answer"],
            id="function_calls",
        ),
    ],
)
def test_names_are_callable_and_prefixed_where_they_collide(protocol, expected):
    tools = [("one", "add"), ("one", "showToken"), ("one", "break.down")]
    tools += [("srv.2", "add"), ("srv.2", "total"), ("srv.2", "answer")]
    assert choose_names(tools, {"python", "total"}, protocol) == expected


def test_names_that_stay_equal_are_refused():
    with pytest.raises(ConfigError) as caught:
        choose_names([("a b", "add"), ("a.b", "add")], set(), CallProtocol.hermes)
    assert (caught.value.key, caught.value.got) == ("tool.mcp, servers a b, a.b", "a_b_add")


def test_an_unknown_tool_is_named_with_the_nearest(tmp_path):
    path = write_servers(tmp_path, mine=EXAMPLE | {"include": ["ad"]})
    with in_memory(), pytest.raises(ConfigError) as caught:
        list_servers(path, {})
    assert caught.value.key == f"tool.mcp={path}, server mine, include"
    assert (caught.value.got, caught.value.cause) == ("ad", "nearest is add")


@pytest.mark.parametrize(
    ("changes", "got", "cause"),
    [
        pytest.param({"command": "no-such"}, "no-such", "PATH=", id="no-program"),
        pytest.param({"args": ["nowhere.py"]}, "python", "nowhere.py", id="no-script"),
        pytest.param(
            {"command": "sh", "args": ["-c", "echo bad $TOKEN >&2"], "env": {"TOKEN": SECRET}},
            "sh",
            "bad [hidden]",
            id="ends-at-once",
        ),
        pytest.param(
            {"command": "sh", "args": ["-c", "head -c 2000000 /dev/zero; sleep 300"]},
            "sh",
            "it wrote a line of more than 1 MiB",
            id="flood",
        ),
        pytest.param({"command": "uvx"}, "uvx", '"network": "host"', id="downloader"),
    ],
)
def test_a_server_that_does_not_start_is_named(tmp_path, monkeypatch, changes, got, cause):
    monkeypatch.setattr("mega_agentrl.tool.mcp.connection.MAX_MESSAGE_BYTES", 1 << 20)
    path = write_servers(tmp_path, mine=EXAMPLE | changes)
    with pytest.raises(ConfigError) as caught:
        list_servers(path, {})
    assert caught.value.key == f"tool.mcp={path}, server mine"
    assert caught.value.got == got
    assert cause in caught.value.cause


def test_a_silent_server_is_ended_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("mega_agentrl.tool.mcp.connection.START_TIMEOUT_S", 0.5)
    path = write_servers(tmp_path, mine={"command": "sleep", "args": ["300"]})
    with pytest.raises(ConfigError) as caught:
        list_servers(path, {})
    assert "no handshake within 0.5 s" in caught.value.cause


async def list_odd_tools(ctx, params):
    odd = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    schemas = {"odd": odd, "even": {"type": "object"}}
    tools = [mcp_types.Tool(name=name, input_schema=schema) for name, schema in schemas.items()]
    return mcp_types.ListToolsResult(tools=tools)


def test_a_tool_with_an_invalid_schema_is_refused_and_can_be_excluded(tmp_path):
    with in_memory(Server("odd", on_list_tools=list_odd_tools)):
        path = write_servers(tmp_path, odd=EXAMPLE)
        with pytest.raises(ConfigError) as caught:
            list_servers(path, {})
        assert caught.value.key.endswith("server odd, tool odd")
        path = write_servers(tmp_path, odd=EXAMPLE | {"exclude": ["odd"]})
        assert names(list_servers(path, {})) == [["even"]]
