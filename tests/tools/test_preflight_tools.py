"""The preflight makes the example calls of the user's tools, and says which of them fail."""

from pathlib import Path

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.reward import RewardConfig
from mega_agentrl.config.sections.tools import ToolConfig
from mega_agentrl.types.records import ToolStatus
from tests.config.refusals import refused, refused_input
from tools.preflight_parts import user_tools
from tools.preflight_parts.user_tools import ExampleCall, call_user_tools

CODE = '''
import asyncio

from mega_agentrl.tool.base import Tool, ToolInputError, ToolResponse
from mega_agentrl.tool.function import tool


@tool(examples=[{"x": 3}, {"x": 4}])
def double(x: int) -> int:
    """Twice."""
    return 2 * x


@tool(examples=[{"x": -1}])
def root(x: float) -> float:
    """Square root."""
    if x < 0:
        raise ToolInputError("x is negative")
    return x**0.5


@tool(examples=[{"x": 1}])
def broken(x: int) -> int:
    """Raises."""
    return {}[x]


@tool(examples=[{"x": "many"}])
def misread(x: int) -> int:
    """Has an example that fits no call."""
    return x


@tool
def silent(x: int) -> int:
    """Has no examples."""
    return x


class Slow(Tool):
    name, text_argument = "slow", "text"
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "examples": [{"text": "a"}],
    }

    async def execute(self, state, arguments, kwargs):
        await asyncio.Event().wait()


class Unstarted(Slow):
    name = "unstarted"

    async def start(self):
        raise OSError("no server")


class Python(Slow):
    name = "python"


class Demanding(Slow):
    name = "demanding"

    def check_kwargs(self, kwargs):
        if "create_kwargs" not in kwargs:
            raise ValueError("a prompt has to say which database")
'''


@pytest.fixture
def call(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)

    def call(*names):
        path = tmp_path / "tools.yaml"
        path.write_text("".join(f"- class_name: mine.py:{name}\n" for name in names))
        return call_user_tools(TrainConfig(tool=ToolConfig(user_tools_file=str(path))))

    return call


def test_answers_are_those_of_the_tool(call):
    calls, problems, notes = call("double")
    assert calls == [
        ExampleCall("double", {"x": 3}, ToolStatus.ok, "6"),
        ExampleCall("double", {"x": 4}, ToolStatus.ok, "8"),
    ]
    assert problems == notes == []


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("root", ToolStatus.user_error),
        ("broken", ToolStatus.infra_error),
        ("Unstarted", ToolStatus.infra_error),
    ],
)
def test_a_call_that_fails_is_a_problem(call, name, status):
    calls, (problem,), _ = call("double", name)
    assert [one.status for one in calls] == [ToolStatus.ok, ToolStatus.ok, status]
    assert problem.config_key == "tool.user_tools_file"
    assert name.lower() in problem.message


def test_a_call_that_does_not_end_is_a_problem(call, monkeypatch):
    monkeypatch.setattr(user_tools, "STEP_TIMEOUT_S", 0.5)
    (timeout,), (problem,), _ = call("Slow")
    assert timeout.status is ToolStatus.timeout
    assert problem.config_key == "tool.user_tools_file"
    assert "slow" in problem.message


@pytest.mark.parametrize("name", ["silent", "Demanding"])
def test_a_tool_that_cannot_be_called_is_named_in_a_note(call, name):
    calls, problems, (note,) = call(name)
    assert calls == problems == []
    assert name.lower() in note


def test_an_example_that_fits_no_call_is_refused_with_the_file(call):
    error = refused_input(call, "misread")
    assert "tools.yaml, entry 1, misread" in error.name and error.got == {"x": "many"}


def test_nothing_is_called_without_a_file():
    assert call_user_tools(TrainConfig()) == ([], [], [])


def test_two_tools_of_one_name_are_refused(call):
    error = refused(call, "double", "double")
    assert "entry 2" in error.key and "entry 1" in str(error)


def test_a_tool_with_the_name_of_a_built_in_tool_is_refused(call):
    error = refused(call, "double", "Python")
    assert "entry 2" in error.key and "PythonTool" in str(error)


def test_the_tools_of_mcp_servers_are_listed():
    path = Path(__file__).parents[2] / "examples" / "mcp.json"
    calls, problems, notes = call_user_tools(TrainConfig(tool=ToolConfig(mcp=str(path))))
    assert (calls, problems, len(notes)) == ([], [], 1)
    assert "shop" in notes[0] and "add_to_basket, total_price" in notes[0]


def test_an_mcp_server_that_does_not_start_is_refused(tmp_path):
    path = tmp_path / "mcp.json"
    path.write_text('{"mcpServers": {"mine": {"command": "no-such-program"}}}')
    error = refused(call_user_tools, TrainConfig(tool=ToolConfig(mcp=str(path))))
    assert (error.key, error.got) == (f"tool.mcp={path}, server mine", "no-such-program")


def test_a_reward_that_cannot_be_imported_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    reward = RewardConfig(rubric={"all": {"mine": 1.0}}, functions={"mine": f"{tmp_path}/mine.py"})
    error = refused(call_user_tools, TrainConfig(reward=reward))
    assert (error.key, error.got) == ("reward.functions.mine", f"{tmp_path}/mine.py")
    assert "'nothing_of_this_name'" in error.cause and "mine.py, line 1)" in error.cause
