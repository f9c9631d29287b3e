"""Methods of the user's classes as tools over one state."""

from __future__ import annotations

import pytest

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.api_classes import ApiClasses
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.types.records import ToolStatus
from tests.config.refusals import refused, refused_input

CODE = '''
class Counter:
    """Counts."""

    def __init__(self):
        self.count, self._secret = 0, 1

    def _load_scenario(self, config, long_context=False):
        self.count = config.get("count", 0) + (100 if long_context else 0)

    def add(self, by: int) -> int:
        """Adds to the count.

        Args:
            by (int): how much.
        """
        self.count += by
        return self.count

    def look(self) -> dict:
        return {"count": self.count}


class Box:
    def put(self, things: list[str]) -> str:
        self.things = things
        return "put"

    def fail(self):
        raise KeyError("broken")


class Other:
    def add(self, by: int):
        pass


class Vague:
    def do(self, what):
        pass


def make():
    return Counter()
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "api.py"
    path.write_text(CODE)
    return str(path)


def kit_of(file, *names):
    return ToolKit(
        ApiClasses([f"{file}:{name}" for name in names]).tools(), protocol=CallProtocol.hermes
    )


def test_public_methods_become_tools_with_hints_and_docstrings(file):
    schemas = kit_of(file, "Counter", "Box").schemas()
    assert list(schemas) == ["add", "look", "fail", "put"]
    function = schemas["add"]["function"]
    assert function["description"] == "Adds to the count."
    assert function["parameters"]["properties"] == {
        "by": {"type": "integer", "description": "how much."}
    }


async def test_all_tools_of_a_trajectory_share_the_instances_and_a_fork_copies_them(file):
    session = kit_of(file, "Counter", "Box").open_session()
    scenario = {"initial_config": '{"Counter": {"count": 5}}'}
    await session.create({"look": {}, "add": {"create_kwargs": scenario}, "fail": {}, "put": None})
    assert (await session.execute("add", {"by": 2})).answer == "7"
    branch = await session.fork()
    assert (await branch.execute("add", {"by": 1})).answer == "8"
    assert (await session.execute("look", {})).answer == '{"count": 7}'
    assert (await branch.execute("look", {})).answer == '{"count": 8}'
    failed = await session.execute("fail", {})
    assert (failed.status, failed.answer) == (
        ToolStatus.user_error,
        "Error during execution: 'broken'",
    )
    assert (await session.execute("put", {"things": []})).is_invalid_call
    for one in (session, branch):
        await one.release()


def test_a_state_shows_public_attributes_and_calls_public_methods(file):
    api = ApiClasses([f"{file}:Counter", f"{file}:Box"])
    state = api.create_state({"involved_classes": ["Counter"], "long_context": True})
    assert state.attributes() == {"Counter": {"count": 100}}
    assert state.call("Counter.add", [1]) == ("101", True)
    assert state.call("add", [], {"by": 1}) == ("102", True)
    for name in ("Box.put", "put", "_load_scenario", "Counter.__init__", "add.__call__"):
        assert not state.call(name, [{}])[1]
    assert state.attributes() == {"Counter": {"count": 102}}


def test_types_of_arguments_are_checked_unless_told_otherwise(file):
    strict, lenient = (
        ToolKit(ApiClasses([f"{file}:Counter"], check).tools()).schemas()["add"]["function"]
        for check in (True, False)
    )
    assert strict["parameters"]["properties"]["by"]["type"] == "integer"
    assert lenient["parameters"]["properties"] == {"by": {"description": "how much."}}
    assert lenient["parameters"]["required"] == ["by"]


@pytest.mark.parametrize(
    "names",
    [("Counter", "Other"), ("Counter", "Counter"), ("make",), ("Missing",)],
    ids=["equal_methods", "twice", "no_class", "unknown"],
)
def test_classes_that_cannot_be_tools_are_refused(file, names):
    with pytest.raises(ConfigError) as caught:
        kit_of(file, *names)
    assert "classes" in caught.value.key or "classes" in str(caught.value)


def test_a_parameter_without_a_hint_is_named(file):
    error = refused_input(kit_of, file, "Vague")
    assert error.name.endswith("method do: parameter what") and error.got == "no type hint"


def test_a_yaml_entry_makes_all_tools_with_its_limits(file, tmp_path):
    entry = (
        "- class_name: mega_agentrl.tool.api_classes.ApiClasses\n"
        f"  config: {{classes: ['{file}:Counter']}}\n  timeout_s: 7\n"
    )
    (tmp_path / "tools.yaml").write_text(entry)
    tools = load_user_tools(tmp_path / "tools.yaml")
    assert [(one.name, one.timeout_s) for one in tools] == [("add", 7.0), ("look", 7.0)]
    (tmp_path / "twice.yaml").write_text(2 * entry)
    assert "another name than add" in refused(load_user_tools, tmp_path / "twice.yaml").expected
    (tmp_path / "schema.yaml").write_text(entry + "  tool_schema: {type: function}\n")
    assert refused(load_user_tools, tmp_path / "schema.yaml").key.endswith("tool_schema")


@pytest.mark.parametrize(
    ("scenario", "got"),
    [
        ({"initial_config": "["}, "["),
        ({"initial_config": "[]"}, []),
        ({"initial_config": {"Clock": {}}}, ["Clock"]),
        ({"involved_classes": ["Clock"]}, ["Clock"]),
        ({"config": {}}, ["config"]),
    ],
    ids=["cut", "list", "unknown_config", "unknown_class", "unknown_key"],
)
def test_scenarios_that_cannot_be_read_are_refused(file, scenario, got):
    (add, _) = ApiClasses([f"{file}:Counter"]).tools()
    assert refused_input(add.check_kwargs, {"create_kwargs": scenario}).got == got
