"""The file of `tool.mcp`: what is read, and what is refused before a server is started."""

import json
from pathlib import Path

import pytest

from mega_agentrl.config.enums import NetworkAccess, SandboxIsolation
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.mcp.server_file import read_server_file
from tests.tool.mcp.servers import write_servers

VARIABLES = {"TOKEN": "t0p-secret"}


def read(folder, **servers):
    return read_server_file(Path(write_servers(folder, **servers)), VARIABLES)


def test_entries_of_other_clients_are_read(tmp_path):
    (tmp_path / "data").mkdir()
    program, web = read(
        tmp_path,
        program={
            "type": "stdio",
            "command": "python",
            "args": ["-m", "server", "/tmp"],
            "env": {"KEY": "${TOKEN}", "LEVEL": "info"},
            "cwd": ".",
            "read_only": ["data"],
            "autoApprove": ["a"],
            "exclude": ["drop"],
        },
        web={
            "url": "https://host/mcp?key=1",
            "headers": {"Authorization": "Bearer ${TOKEN}"},
            "timeout_s": 5,
            "per_trajectory": True,
        },
        off={"command": "python", "disabled": True},
    )
    assert program.command == ("python", "-m", "server", "/tmp")
    assert program.environment == {"KEY": "t0p-secret", "LEVEL": "info"}
    assert program.read_only == (tmp_path / "data", tmp_path)
    assert program.working_folder == tmp_path
    assert (program.network, program.isolation) == (NetworkAccess.none, SandboxIsolation.bubblewrap)
    assert program.per_trajectory
    assert program.has_replayable_state
    assert (program.include, program.exclude) == (None, ("drop",))
    assert (web.per_trajectory, web.has_replayable_state, web.timeout_s) == (True, False, 5.0)
    assert web.headers == {"Authorization": "Bearer t0p-secret"}
    assert web.origin == "https://host/mcp"
    assert web.redact("no Bearer t0p-secret, no t0p-secret") == "no [hidden], no [hidden]"
    assert "t0p-secret" not in repr([program, web])


def test_only_what_stands_for_a_variable_is_a_secret(tmp_path):
    """A literal value is a folder or a word, which the policy has to read in answers."""
    (program,) = read(
        tmp_path, a={"command": "b", "env": {"ROOT": "/srv/documents", "KEY": "${TOKEN}"}}
    )
    text = "Listing of /srv/documents with t0p-secret"
    assert program.redact(text) == "Listing of /srv/documents with [hidden]"
    (web,) = read(
        tmp_path, a={"url": "http://b", "headers": {"Accept": "application/json", "X": "a${TOKEN}"}}
    )
    assert web.redact("no application/json, at0p-secret") == "no application/json, [hidden]"


@pytest.mark.parametrize(
    ("entry", "key", "got"),
    [
        pytest.param({}, "", [], id="nothing"),
        pytest.param({"command": "a", "url": "http://b"}, "", ["command", "url"], id="both"),
        pytest.param({"command": ""}, ", command", "", id="no-program"),
        pytest.param({"command": "a", "timeout": 3, "timout_s": 3}, "", "timout_s", id="unknown"),
        pytest.param({"command": "a", "headers": {}}, "", "headers", id="header-of-a-command"),
        pytest.param({"command": "a", "args": "b"}, ", args", "str", id="args-as-text"),
        pytest.param({"command": "a", "network": "all"}, ", network", "all", id="network"),
        pytest.param({"command": "a", "timeout_s": 0}, ", timeout_s", 0, id="timeout"),
        pytest.param({"command": "a", "env": {"K": "${NO}"}}, ", env.K", "${NO}", id="variable"),
        pytest.param({"command": "a", "env": {"K": 3}}, ", env.K", "int", id="value"),
        pytest.param({"command": "a", "cwd": "/nowhere"}, ", cwd", "/nowhere", id="folder"),
        pytest.param({"url": "http://b", "type": "sse"}, ", type", "sse", id="old-transport"),
        pytest.param({"url": "ftp://u:p@b/c?d"}, ", url", "ftp://b/c", id="url-with-password"),
        pytest.param({"command": "a", "args": [__file__]}, ", args", __file__, id="unseen-file"),
    ],
)
def test_a_mistake_is_named_with_server_and_key(tmp_path, entry, key, got):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, mine=entry)
    path = tmp_path / "mcp.json"
    assert caught.value.key == f"tool.mcp={path}, server mine{key}"
    assert caught.value.got == got


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("{", id="no-json"),
        pytest.param(json.dumps({"servers": {"a": {"command": "b"}}}), id="other-key"),
        pytest.param(json.dumps({"mcpServers": {}}), id="empty"),
        pytest.param(
            json.dumps({"mcpServers": {"a": {"command": "b", "disabled": True}}}), id="all-disabled"
        ),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, content):
    path = tmp_path / "mcp.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_server_file(path, VARIABLES)
    assert (caught.value.key, caught.value.got) == ("tool.mcp", str(path))


def test_an_argument_that_is_listed_may_be_used(tmp_path):
    folder = str(Path(__file__).parent)
    (config,) = read(tmp_path, a={"command": "b", "args": [__file__], "read_only": [folder]})
    assert config.command[1] == __file__
