"""User tools: loaded from yaml, and every mistake named before anything starts."""

from pathlib import Path

import pytest

from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.types.records import ToolStatus

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tools.yaml"
CODE = '''
from mega_agentrl.tool.function import tool
from mega_agentrl.tool.base import Tool, ToolResponse


class Notes(Tool):
    name = "notes"
    text_argument = "text"

    def __init__(self, prefix, limit=3):
        if limit < 1:
            raise KeyError("limit")
        self.prefix = prefix

    async def execute(self, state, arguments, kwargs):
        return ToolResponse(text=self.prefix + arguments["text"])


class Nameless(Notes):
    name = None


class Itself(Notes):
    def schema(self):
        return {"type": "function", "function": {"name": self.name}}


class Unfinished(Tool):
    name = "unfinished"
    text_argument = "x"


@tool
def double(x: int) -> int:
    """Twice."""
    return 2 * x


plain = 3
'''


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")

    def load(text):
        path = tmp_path / "tools.yaml"
        path.write_text(text)
        return load_user_tools(path)

    return load


async def test_classes_functions_and_renamed_tools(load):
    tools = load("""
- class_name: mine.py:Notes
  config: {prefix: "a:"}
  timeout_s: 5
  max_concurrent: 2
- class_name: mine.py:Notes
  config: {prefix: "b:"}
  tool_schema:
    type: function
    function:
      name: other
      description: Another.
      parameters: {type: object, properties: {text: {type: string, maxLength: 3}}}
- class_name: mine.py:double
  timeout_s: 1.5
""")
    assert [tool.name for tool in tools] == ["notes", "other", "double"]
    assert (tools[0].timeout_s, tools[0].max_concurrent) == (5.0, 2)
    assert (tools[1].timeout_s, tools[1].max_concurrent) == (60.0, None)
    toolkit = ToolKit(tools)
    assert toolkit.schemas(["other"])["other"]["function"]["description"] == "Another."
    assert toolkit.stop_strings == ("</notes>", "</other>", "</double>")
    session = toolkit.open_session()
    await session.create({})
    assert (await session.execute("notes", {"text": "x"})).answer == "a:x"
    assert (await session.execute("other", {"text": "x"})).answer == "b:x"
    assert (await session.execute("double", {"x": "4"})).answer == "8"
    long = await session.execute("other", {"text": "long"})
    assert long.status is ToolStatus.user_error and "text: 'long' is too long" in long.answer


def test_limits_of_one_entry_are_not_those_of_the_next(load):
    one, two = load(
        "- {class_name: 'mine.py:double', timeout_s: 1}\n- class_name: mine.py:double\n"
    )
    assert (one.timeout_s, two.timeout_s) == (1.0, 60.0)
    with pytest.raises(ValueError, match="each name once"):
        ToolKit([one, two])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid yaml"),
        ("class_name: x", "expected a non-empty yaml list of entries; probable cause: got dict"),
        ("- mine.py:Notes", "expected a mapping with class_name"),
        ("- {class_name: 'mine.py:Notes', confg: {}}", "keys=['confg']"),
        ("- {class_name: 'mine.py:Notes', config: 3}", "config=3: expected a mapping"),
        ("- class_name: Notes", "class_name='Notes': expected a class"),
        ("- class_name: not_there.tools.Notes", "No module named 'not_there'"),
        ("- class_name: other.py:Notes", "there is no file"),
        ("- class_name: bad.py:Notes", "No module named 'nothing_of_this_name'"),
        ("- class_name: mine.py:Note", "the module has no Note, but defines "),
        ("- class_name: mine.py:plain", "got 3"),
        ("- class_name: mine.py:Unfinished", "Unfinished lacks the methods ['execute']"),
        ("- class_name: mine.py:Notes", "missing a required argument: 'prefix'"),
        (
            "- {class_name: 'mine.py:Notes', config: {prefix: a, size: 1}}",
            "unexpected keyword argument 'size'",
        ),
        (
            "- {class_name: 'mine.py:Notes', config: {prefix: a, limit: 0}}",
            "config={'prefix': 'a', 'limit': 0}: expected arguments with which Notes",
        ),
        ("- {class_name: 'mine.py:Nameless', config: {prefix: a}}", "it has no name"),
        ("- {class_name: 'mine.py:double', config: {x: 1}}", "expected none for a function"),
        ("- {class_name: 'mine.py:double', timeout_s: 0}", "timeout_s=0: expected a number"),
        ("- {class_name: 'mine.py:double', max_concurrent: 1.5}", "max_concurrent=1.5"),
        ("- {class_name: 'mine.py:double', tool_schema: {name: x}}", "tool_schema: got"),
        (
            "- {class_name: 'mine.py:Itself', config: {prefix: a}, tool_schema: "
            "{type: function, function: {name: n, description: d}}}",
            "defines its own schema",
        ),
    ],
)
def test_mistakes_name_file_and_entry(load, text, message):
    with pytest.raises(ValueError, match=r"tool\.user_tools_file=.*tools\.yaml") as caught:
        load(text)
    assert message in str(caught.value)
    if text.startswith("-"):
        assert "entry 1" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        load_user_tools(tmp_path / "no.yaml")


def test_the_example_loads():
    (tool,) = load_user_tools(EXAMPLE)
    assert (tool.name, tool.timeout_s) == ("gsm8k", 5.0)
    assert ToolKit([tool]).schemas()["gsm8k"]["function"]["description"].startswith("Checks")
