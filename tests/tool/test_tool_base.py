"""A subclass of `Tool` needs a name, a text argument and `execute`."""

import pytest

from mega_agentrl.tool.base import Tool, ToolResponse


class Echo(Tool):
    name = "echo"
    description = "Says it again."
    text_argument = "text"

    async def execute(self, state, arguments, kwargs):
        return ToolResponse(text=arguments["text"])


async def test_defaults_need_nothing():
    tool = Echo()
    tool.check_kwargs({})
    await tool.start()
    state = await tool.create({})
    assert (await tool.execute(state, {"text": "a"}, {})).text == "a"
    assert await tool.fork(state) is state
    assert await tool.calc_reward(state, {}) is None
    await tool.release(state, {})
    tool.close_now()
    await tool.close()


def test_the_schema_is_of_one_text_unless_parameters_say_more():
    assert Echo().schema() == {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "Says it again.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    }
    tool = Echo()
    tool.parameters = {"type": "object", "properties": {"text": {}, "times": {}}}
    assert tool.schema()["function"]["parameters"] == tool.parameters


def test_execute_is_required():
    class Nothing(Tool):
        name = "nothing"
        text_argument = "text"

    with pytest.raises(TypeError, match="execute"):
        Nothing()
