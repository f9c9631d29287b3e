"""The tools of a server before the run: pages, names, choices, and servers that do not start."""

import asyncio

import pytest

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import ToolConfig
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.function_schema import FunctionSchema
from mega_agentrl.tool.mcp.listing import (
    MAX_DESCRIPTION_CHARS,
    MAX_LISTING_CHARS,
    MAX_SCHEMA_CHARS,
    MAX_TOOLS,
    choose_names,
    list_servers,
)
from mega_agentrl.tool.toolkit import build_toolkit, load_mcp_servers
from tests.fakes import CharCodec
from tests.tool.mcp.example_server import TOOLS
from tests.tool.mcp.servers import EXAMPLE, VARIABLES, RawServer, in_memory, write_servers


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
            {
                "command": "sh",
                "args": ["-c", "echo bad $TOKEN >&2"],
                "env": {"TOKEN": "${EXAMPLE_TOKEN}"},
            },
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
def test_a_server_that_does_not_start_is_named(tmp_path, changes, got, cause):
    path = write_servers(tmp_path, mine=EXAMPLE | changes)
    with pytest.raises(ConfigError) as caught:
        list_servers(path, VARIABLES)
    assert caught.value.key == f"tool.mcp={path}, server mine"
    assert caught.value.got == got
    assert cause in caught.value.cause


def test_a_silent_server_is_ended_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("mega_agentrl.tool.mcp.connection.START_TIMEOUT_S", 0.5)
    path = write_servers(tmp_path, mine={"command": "sleep", "args": ["300"]})
    with pytest.raises(ConfigError) as caught:
        list_servers(path, {})
    assert "no handshake within 0.5 s" in caught.value.cause


STRING = {"type": "string"}
PAIR = {"type": "array", "items": [{"type": "string"}, {"type": "number"}]}
PEOPLE = {"$ref": "#/$defs/Person"}
PERSON = {"Person": {"type": "object", "properties": {"name": STRING}, "required": ["name"]}}


def listed_raw(folder, tools, **changes):
    with in_memory(RawServer(tools)):
        return list_servers(write_servers(folder, raw=EXAMPLE | changes), VARIABLES)


@pytest.mark.parametrize(
    ("schema", "arguments", "wrong"),
    [
        pytest.param({}, {"a": 1}, None, id="empty"),
        pytest.param(None, {"a": 1}, None, id="null"),
        pytest.param({"type": "object", "properties": None}, {"a": 1}, None, id="null-properties"),
        pytest.param({"properties": {"a": STRING}}, {"a": "x"}, {"a": 1}, id="no-type"),
        pytest.param({"type": ["object", "null"]}, {"a": 1}, None, id="two-types"),
        pytest.param(
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
                    {"type": "object", "properties": {"b": STRING}, "required": ["b"]},
                ]
            },
            {"b": "x"},
            {"c": "x"},
            id="one-of-at-the-top",
        ),
        pytest.param(
            {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, {}, id="any-of-at-top"
        ),
        pytest.param(
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"a": PAIR},
            },
            {"a": ["x", 1]},
            {"a": [1, "x"]},
            id="draft-07-tuple",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": PAIR}},
            {"a": ["x", 1]},
            {"a": [1, "x"]},
            id="tuple-without-a-draft",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^\p{L}+$"}}},
            {"a": "x"},
            {"a": "1"},
            id="javascript-class",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": STRING | {"pattern": r"^(?<year>\d{4})$"}}},
            {"a": "2026"},
            {"a": "x"},
            id="javascript-group",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": STRING | {"pattern": r"^(?!x)(a)\1$"}}},
            {"a": "x"},
            {"a": 1},
            id="look-around",
        ),
        pytest.param(
            {
                "type": "object",
                "patternProperties": {"^\\p{L}": STRING, "^(?!a)": STRING},
                "additionalProperties": False,
            },
            {"a": "x"},
            {"1": "x"},
            id="javascript-name",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": STRING | {"pattern": "^[a-z]$"}}},
            {"a": "x"},
            {"a": "X"},
            id="common-pattern",
        ),
        pytest.param(
            {"type": "object", "properties": {"pattern": STRING}, "required": ["pattern"]},
            {"pattern": "("},
            {"pattern": 1},
            id="parameter-pattern",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": PEOPLE}, "$defs": PERSON},
            {"a": {"name": "x"}},
            {"a": "x"},
            id="reference",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": STRING}, "examples": [{"a": 1}]},
            {"a": "x"},
            {"a": 1},
            id="wrong-example",
        ),
    ],
)
async def test_schemas_are_taken_as_servers_write_them(tmp_path, schema, arguments, wrong):
    tools = [{"name": "odd", "inputSchema": schema}]
    listed = await asyncio.to_thread(listed_raw, tmp_path, tools)
    kit = build_toolkit(ToolConfig(), CharCodec(), mcp_servers=listed, protocol=CallProtocol.hermes)
    parameters = kit.schemas(["odd"])["odd"]["function"]["parameters"]
    assert parameters["type"] == "object" and isinstance(parameters["properties"], dict)
    checked = FunctionSchema(kit.schemas(["odd"])["odd"], "here")
    assert checked.validate_arguments(arguments) == arguments
    if wrong is not None:
        with pytest.raises(ToolInputError):
            checked.validate_arguments(wrong)


def test_a_tool_without_a_schema_takes_anything(tmp_path):
    (server,) = listed_raw(tmp_path, [{"name": "now", "description": None, "title": "Time"}])
    (tool,) = server.tools
    assert (tool.description, tool.is_read_only) == ("Time", False)
    assert tool.parameters == {"type": "object", "properties": {}}


GOOD = {"name": "even", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
ODD = {"type": "object", "properties": {"a": {"type": "nonsense"}}}


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"name": "odd", "inputSchema": ODD}, id="no-schema"),
        pytest.param({"name": "odd", "inputSchema": {"type": "string"}}, id="text"),
        pytest.param({"name": "odd", "inputSchema": True}, id="no-object"),
        pytest.param({"name": "odd", "inputSchema": {"$ref": "#/$defs/No"}}, id="no-reference"),
        pytest.param(
            {"name": "odd", "inputSchema": {"properties": {"a": {"$ref": "https://x.example/y"}}}},
            id="reference-elsewhere",
        ),
        pytest.param(
            {"name": "odd", "inputSchema": {"required": ["a"], "additionalProperties": False}},
            id="no-call",
        ),
        pytest.param({"name": "", "inputSchema": {}}, id="no-name"),
        pytest.param({"name": "even", "inputSchema": {"required": ["x"]}}, id="same-name"),
        pytest.param("odd", id="no-tool"),
    ],
)
def test_a_tool_that_cannot_be_used_is_left_out_by_name_and_the_others_are_used(
    tmp_path, caplog, odd
):
    (server,) = listed_raw(tmp_path, [GOOD, odd])
    assert [tool.name for tool in server.tools] == ["even"] and server.tools[0].is_read_only
    (record,) = caplog.records
    assert record.args[:2] == (server.config.key, odd.get("name") if odd != "odd" else None)


BIG_ENUM = {"properties": {"a": {"enum": [f"value {i}" for i in range(MAX_SCHEMA_CHARS // 8)]}}}
DOUBLED = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"description": "d" * (MAX_DESCRIPTION_CHARS + 1)}, id="long-description"),
        pytest.param({"inputSchema": BIG_ENUM}, id="large-schema"),
        pytest.param(
            {
                "inputSchema": {
                    "properties": {"a": {"$ref": "#/$defs/d0"}},
                    "$defs": DOUBLED | {"d30": {}},
                }
            },
            id="doubling-alternatives",
        ),
    ],
)
def test_a_tool_that_is_too_large_is_left_out(tmp_path, odd):
    (server,) = listed_raw(tmp_path, [{"name": "odd", "inputSchema": {}} | odd, GOOD])
    assert [tool.name for tool in server.tools] == ["even"]


@pytest.mark.parametrize(
    ("tools", "got"),
    [
        pytest.param([{"name": str(i)} for i in range(MAX_TOOLS + 1)], MAX_TOOLS + 1, id="many"),
        pytest.param([{"name": "a", "x": "x" * MAX_LISTING_CHARS}], MAX_LISTING_CHARS, id="long"),
    ],
)
def test_a_listing_that_is_too_large_is_refused(tmp_path, tools, got):
    with pytest.raises(ConfigError) as caught:
        listed_raw(tmp_path, tools)
    assert caught.value.key.endswith("server raw, tools") and caught.value.got >= got


def test_a_tool_that_is_excluded_is_not_checked(tmp_path, caplog):
    odd = {"name": "odd", "inputSchema": ODD}
    assert names(listed_raw(tmp_path, [odd, GOOD], exclude=["odd"])) == [["even"]]
    assert names(listed_raw(tmp_path, [odd, GOOD], include=["even"])) == [["even"]]
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "place", "got"),
    [
        pytest.param({"include": ["odd"]}, ", tool odd", "odd", id="included-by-name"),
        pytest.param({"exclude": ["even"]}, "", ["odd", "even"], id="none-left"),
    ],
)
def test_a_server_without_the_tools_that_the_file_asks_for_is_refused(
    tmp_path, changes, place, got
):
    with pytest.raises(ConfigError) as caught:
        listed_raw(tmp_path, [{"name": "odd", "inputSchema": ODD}, GOOD], **changes)
    assert caught.value.key == f"tool.mcp={tmp_path}/mcp.json, server raw{place}"
    assert caught.value.got == got and "nonsense" in caught.value.cause
