"""The tools `bash` and `edit` on a workspace, and the reward of a command in it."""

import asyncio
import json
from pathlib import Path

import pytest
import pytest_asyncio

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import PythonToolConfig, ToolConfig, WorkspaceToolConfig
from mega_agentrl.errors import InputError
from mega_agentrl.tool.toolkit import build_toolkit, built_in_tools
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import Prompt, ToolStatus
from tests.fakes import CharCodec

in_module_loop = pytest.mark.asyncio(loop_scope="module")
"""For tests that share the workers of the module."""
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
(ROW,) = (
    json.loads(line)
    for line in (EXAMPLES / "my_project_tasks.jsonl").read_text(encoding="utf-8").splitlines()
)
TASK = ROW["extra_info"]["tools_kwargs"]
# The plugins of this environment would take most of the time.
COMMANDS = TASK["bash"]["create_kwargs"]
COMMANDS["reward_command"] = COMMANDS["reward_command"].replace(
    "python -I", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -I"
)


@pytest.fixture(scope="module")
def config():
    workspace = WorkspaceToolConfig(
        root="host", folder=str(EXAMPLES / "my_project"), num_workers=2, disk_limit_mib=64
    )
    return ToolConfig(
        python=PythonToolConfig(preload_modules=[], num_workers=1), workspace=workspace
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def toolkit(config):
    kit = build_toolkit(config, CharCodec())
    await kit.start()
    yield kit
    await kit.close()


async def call(session, tool, **arguments):
    outcome = await session.execute(tool, arguments)
    return outcome.status, outcome.answer


def test_the_tools_are_offered_only_with_a_root(config):
    assert list(built_in_tools(config)) == ["python", "bash", "edit"]
    assert list(built_in_tools(ToolConfig())) == ["python"]


@in_module_loop
async def test_the_example_is_solved_in_a_fork_and_not_in_its_parent(toolkit):
    session = toolkit.open_session()
    await session.create(TASK)
    assert await call(session, "bash", command="cd / && git -C /workspace log --format=%s") == (
        ToolStatus.ok,
        "start",
    )
    child = await session.fork()
    status, answer = await call(
        child,
        "edit",
        command="replace",
        path="median.py",
        old="return ordered[middle - 1] + ordered[middle] / 2",
        new="return (ordered[middle - 1] + ordered[middle]) / 2",
    )
    assert status is ToolStatus.ok
    assert "10\t    return (ordered" in answer
    assert await call(child, "bash", command="pwd; cd /workspace; git status --short") == (
        ToolStatus.ok,
        "/\n M median.py",
    )
    # A test that is made to pass, and a function in place of the program, do not earn the reward.
    await call(session, "bash", command="python() { true; }; alias python=true; PATH=/nowhere")
    cheats = {
        "test_median.py": "def test(): pass",
        "conftest.py": "collect_ignore = ['test_median.py']\nimport os; os._exit(0)",
        "median.py": "import os; os._exit(0)",
        "pytest.py": "",
    }
    for path, text in cheats.items():
        await call(session, "edit", command="create", path=path, text=text)
    await call(session, "bash", command="PATH=/usr/bin; git commit -qam x; git tag -f start")
    assert await child.calc_reward() == {"bash": 1.0}
    assert await session.calc_reward() == {"bash": 0.0}
    await session.release()
    await child.release()


@in_module_loop
async def test_a_call_that_the_time_limit_cuts_off_does_not_keep_the_reward_from_being_computed(
    toolkit,
):
    session = toolkit.open_session()
    await session.create({"bash": {"create_kwargs": {"reward_command": "test -e done"}}})
    assert (await call(session, "bash", command="touch done"))[0] is ToolStatus.ok
    cut = asyncio.create_task(call(session, "bash", command="sleep 600"))
    await asyncio.sleep(0.1)  # whether it has begun makes no difference
    cut.cancel()
    assert await session.calc_reward() == {"bash": 1.0}
    await session.release()


@in_module_loop
async def test_edit_views_creates_and_replaces(toolkit):
    session = toolkit.open_session()
    await session.create({"bash": {}, "edit": {}})
    text = "one\ntwo\nthree\ntwo\n"
    path = "/tmp/new/notes.txt"
    assert await call(session, "edit", command="create", path=path, text=text) == (
        ToolStatus.ok,
        f"Created {path}, 4 lines.",
    )
    view = await call(session, "edit", command="view", path=path, first_line=2, last_line=3)
    assert view == (ToolStatus.ok, "     2\ttwo\n     3\tthree")
    wrong = [
        {"command": "replace", "old": "two", "new": "2"},
        {"command": "replace", "old": "four", "new": "4"},
        {"command": "replace", "old": "one"},
        {"command": "view", "first_line": 9},
        {"command": "view", "path": "/tmp"},
        {"command": "create", "path": "/proc/none", "text": ""},
        {"command": "view", "path": "/dev/urandom"},
    ]
    for arguments in wrong:
        status, answer = await call(session, "edit", **({"path": path} | arguments))
        assert status is ToolStatus.user_error, (arguments, answer)
    assert await call(session, "bash", command=f"cat {path}") == (ToolStatus.ok, text.strip())
    await session.release()


@in_module_loop
async def test_failures_are_typed(toolkit):
    session = toolkit.open_session()
    await session.create({"bash": {"execute_kwargs": {"timeout_s": 1.0}}})
    assert (await call(session, "bash", command="sleep 9"))[0] is ToolStatus.timeout
    await session.release()
    session = toolkit.open_session()
    await session.create({})
    assert await call(session, "bash", command="exit 3") == (
        ToolStatus.user_error,
        "[exit code 3]",
    )
    assert (await call(session, "bash", command="echo a\0b"))[0] is ToolStatus.user_error
    assert (await call(session, "bash", command=":" * 200_000))[0] is ToolStatus.user_error
    assert await call(session, "bash", command="echo \ud800") == (ToolStatus.ok, "?")
    assert await call(session, "bash", command=":") == (ToolStatus.ok, "[no output]")
    assert await session.calc_reward() == {}
    await session.release()


@in_module_loop
async def test_a_setup_command_that_fails_fails_the_trajectory(toolkit):
    with pytest.raises(ToolSessionError) as caught:
        await toolkit.open_session().create(
            {"bash": {"create_kwargs": {"setup_command": "echo because; exit 2"}}}
        )
    assert "because" in caught.value.outcome.answer


@pytest.mark.parametrize(
    "kwargs", [{"setup": "x"}, {"reward_command": ["x"]}], ids=["name", "type"]
)
def test_wrong_kwargs_of_a_prompt_are_refused(config, kwargs):
    kit = build_toolkit(config, CharCodec())
    prompt = Prompt(
        prompt_id="p",
        messages=({"role": "user", "content": "x"},),
        data_source="x",
        ground_truth="",
        token_ids=(),
        tools_kwargs={"bash": {"create_kwargs": kwargs}},
    )
    with pytest.raises(InputError) as caught:
        kit.check_prompt_kwargs([prompt])
    assert (caught.value.name, caught.value.got) == ("prompt p, create_kwargs of bash", kwargs)
    kit.close_now()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"root": "/usr/include"}, "tool.workspace.root"),
        ({"root": "/none"}, "tool.workspace.root"),
        ({"folder": "/none"}, "tool.workspace.folder"),
    ],
    ids=["no shell", "no root", "no folder"],
)
async def test_a_workspace_that_cannot_start_names_the_setting(config, changes, key):
    values = {"root": "host", "folder": ""} | changes
    kit = build_toolkit(
        ToolConfig(python=config.python, workspace=WorkspaceToolConfig(**values)), CharCodec()
    )
    with pytest.raises(ConfigError) as caught:
        await kit.start()
    assert caught.value.key == key
