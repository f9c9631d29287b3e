"""User tools: loaded from yaml, and every mistake named before anything starts."""

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.tool.python import PythonTool
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.types.records import ToolStatus
from tests.config.refusals import refused

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


class Blocking(Notes):
    def execute(self, state, arguments, kwargs):
        return ToolResponse(text="")


class TwoArguments(Notes):
    async def execute(self, state, arguments):
        return ToolResponse(text="")


class Fourth(Notes):
    async def release(self, state, kwargs, reason):
        pass


class Late(Notes):
    async def check_kwargs(self, kwargs):
        pass


class Constant(Notes):
    calc_reward = 1.0


class Misspelt(Notes):
    async def create(self, kwargs):
        return []

    async def forks(self, state):
        return list(state)


class OtherArgument(Notes):
    text_argument = "note"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}


class NoMapping(Notes):
    parameters = 3


class Impossible(Notes):
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text", "note"],
        "additionalProperties": False,
    }


class OfVerl:
    def __init__(self, config, tool_schema):
        pass

    async def create(self, instance_id=None, **kwargs):
        return instance_id, None

    async def execute(self, instance_id, parameters, **kwargs):
        return "", 0.0, {}


@tool
def double(x: int) -> int:
    """Twice."""
    return 2 * x


plain = 3
'''

NOTES = "class_name: 'mine.py:Notes'"
DOUBLE = "class_name: 'mine.py:double'"


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")

    def load(text, built_in=None):
        path = tmp_path / "tools.yaml"
        path.write_text(text)
        return load_user_tools(path, built_in)

    return load


async def test_classes_and_functions_become_tools_and_may_be_renamed(load):
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
    one, two = load(f"""
- {{{DOUBLE}, timeout_s: 1}}
- {DOUBLE}
  tool_schema: {{type: function, function: {{name: other, description: "",
    parameters: {{type: object, properties: {{x: {{type: integer}}}}}}}}}}
""")
    assert (one.timeout_s, two.timeout_s) == (1.0, 60.0)


def test_two_tools_of_one_name_are_refused_with_both_classes(load):
    error = refused(load, f"- {DOUBLE}\n- {{{NOTES}, config: {{prefix: a}}}}\n- {DOUBLE}\n")
    assert error.key.endswith("tools.yaml, entry 3, class_name") and error.got == "mine.py:double"
    assert "double, which mine.py:double (entry 1) has" in error.expected
    error = refused(load, f"- {DOUBLE}", {"double": PythonTool})
    assert error.key.endswith("tools.yaml, entry 1, class_name")
    assert "the built-in PythonTool" in error.expected


@pytest.mark.parametrize(
    ("text", "key", "cause"),
    [
        ("a: [", "", "not valid yaml"),
        ("class_name: x", "", "dict"),
        ("- mine.py:Notes", ", entry 1", ""),
        (f"- {{{NOTES}, confg: {{}}}}", ", entry 1, keys", ""),
        (f"- {{{NOTES}, config: 3}}", ", entry 1, config", ""),
        ("- class_name: bad.py:Notes", ", entry 1, class_name", "nothing_of_this_name"),
        ("- class_name: mine.py:plain", ", entry 1, class_name", "got 3"),
        ("- class_name: mine.py:Unfinished", ", entry 1, class_name", "['execute']"),
        (f"- {NOTES}", ", entry 1, config", "'prefix'"),
        (f"- {{{NOTES}, config: {{prefix: a, size: 1}}}}", ", entry 1, config", "'size'"),
        (f"- {{{NOTES}, config: {{prefix: a, limit: 0}}}}", ", entry 1, config", "'limit'"),
        (
            "- {class_name: 'mine.py:Nameless', config: {prefix: a}}",
            ", entry 1, class_name",
            "no name",
        ),
        (f"- {{{DOUBLE}, config: {{x: 1}}}}", ", entry 1, config", ""),
        (f"- {{{DOUBLE}, timeout_s: 0}}", ", entry 1, timeout_s", ""),
        (f"- {{{DOUBLE}, max_concurrent: 1.5}}", ", entry 1, max_concurrent", ""),
    ],
)
def test_a_mistake_is_refused_with_file_and_entry(load, text, key, cause):
    error = refused(load, text)
    setting, _, rest = error.key.partition("=")
    assert setting == "tool.user_tools_file"
    assert rest.partition("tools.yaml")[2] == key
    assert cause in error.cause


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        ("Blocking", "execute", "async def execute(self, state, arguments, kwargs)"),
        ("TwoArguments", "execute", "async def execute(self, state, arguments, kwargs)"),
        ("Fourth", "release", "async def release(self, state, kwargs)"),
        ("Late", "check_kwargs", "def check_kwargs(self, kwargs)"),
        ("Constant", "calc_reward", "async def calc_reward(self, state, kwargs)"),
        ("Misspelt", "fork", "async def fork(self, state), as the class has a method create"),
    ],
    ids=["not_async", "too_few", "too_many", "async", "no_method", "shared_state"],
)
def test_a_wrong_or_missing_method_is_refused(load, name, method, expected):
    error = refused(load, f"- {{class_name: 'mine.py:{name}', config: {{prefix: a}}}}")
    assert error.key.endswith(f"tools.yaml, entry 1, {name}.{method}")
    assert error.expected == expected
    assert name == "Constant" or "mine.py, line " in error.cause


@pytest.mark.parametrize(
    ("entry", "name", "got"),
    [
        ("class_name: 'mine.py:OtherArgument', config: {prefix: a}", "text_argument", "note"),
        (
            f"{DOUBLE}, tool_schema: {{type: function, function: {{name: double, description: d, "
            "parameters: {type: object, properties: {x: {type: integer}, y: {type: integer}}}}}",
            "parameters of its schema",
            ["y"],
        ),
        ("class_name: 'mine.py:NoMapping', config: {prefix: a}", "NoMapping.schema", 3),
        (
            "class_name: 'mine.py:Impossible', config: {prefix: a}",
            "arguments that its schema requires and forbids",
            ["note"],
        ),
        (
            f"{DOUBLE}, tool_schema: {{type: function, function: {{name: double, description: d, "
            "parameters: true}}",
            "function.parameters of double",
            True,
        ),
    ],
    ids=["class", "function", "no_mapping", "impossible", "boolean"],
)
def test_a_schema_that_fits_no_call_is_refused(load, entry, name, got):
    with pytest.raises(InputError) as caught:
        load(f"- {{{entry}}}")
    assert "tools.yaml, entry 1, " in caught.value.name
    assert caught.value.name.endswith(f", {name}")
    assert caught.value.got == got


def test_the_form_of_verls_files_is_accepted(load):
    (tool,) = load("""
tools:
  - class_name: mine.py:Notes
    config: {type: native, prefix: "a:"}
    tool_schema:
      type: function
      function:
        name: notes
        description: Keeps a note.
        parameters:
          type: object
          properties: {text: {type: string, description: The note}}
          required: [text]
        strict: false
""")
    assert (tool.name, tool.prefix, tool.description) == ("notes", "a:", "Keeps a note.")


@pytest.mark.parametrize(
    "name",
    ["mine.py:OfVerl", "verl.tools.gsm8k_tool.Gsm8kTool"],
    ids=["signature", "package"],
)
def test_a_class_of_verl_is_refused_with_what_to_change(load, name):
    error = refused(load, f"tools: [{{class_name: '{name}', config: {{type: native}}}}]")
    assert error.key.endswith("tools.yaml, entry 1, class_name") and error.got == name
    assert "execute(state, arguments, kwargs)" in error.cause and "own_tool.md" in error.cause


@pytest.mark.parametrize(
    "entry",
    [
        f"{DOUBLE}, tool_schema: {{name: x}}",
        "class_name: 'mine.py:Itself', config: {prefix: a}, "
        "tool_schema: {type: function, function: {name: n, description: d}}",
    ],
    ids=["wrong", "ignored"],
)
def test_a_schema_that_cannot_be_used_is_refused_with_file_and_entry(load, entry):
    with pytest.raises(InputError) as caught:
        load(f"- {{{entry}}}")
    assert caught.value.name.endswith("tools.yaml, entry 1, tool_schema")


def test_a_missing_file_is_refused(tmp_path):
    error = refused(load_user_tools, tmp_path / "no.yaml")
    assert (error.key, error.got) == ("tool.user_tools_file", tmp_path / "no.yaml")
