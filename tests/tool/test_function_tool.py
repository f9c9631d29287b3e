"""`@tool`: the schema comes from hints and docstring, calls run on the loop or in a thread."""

import asyncio
import threading
from typing import Any, Literal, Optional

import pytest

from mega_agentrl.tool.base import ToolInputError, ToolResponse
from mega_agentrl.tool.function import FunctionTool, tool
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.records import ToolStatus
from tests.config.refusals import refused_input


@tool
def area(width: float, height: float = 1.0) -> float:
    """Area of a rectangle,
    in square metres.

    Args:
        width: in metres,
            never negative.
        height (float): in metres.

    Returns:
        width: not a parameter here.
    """
    if width < 0:
        raise ToolInputError("a width is not negative")
    return width * height


@tool(name="look", timeout_s=0.2, max_concurrent=1)
async def look_up(query: str) -> dict:
    """Looks up."""
    await asyncio.sleep(0)
    return {"found": query}


async def call(made, text):
    toolkit = ToolKit([made])
    session = toolkit.open_session()
    await session.create({})
    (parsed,) = toolkit.parse_calls(f"<{made.name}> {text} </{made.name}>")
    try:
        return await session.execute(parsed.tool, parsed.arguments)
    finally:
        await session.release()


def test_the_schema_follows_from_hints_and_docstring():
    assert area.schema()["function"] == {
        "name": "area",
        "description": "Area of a rectangle, in square metres.",
        "parameters": {
            "type": "object",
            "properties": {
                "width": {"type": "number", "description": "in metres, never negative."},
                "height": {"type": "number", "description": "in metres.", "default": 1.0},
            },
            "required": ["width"],
            "additionalProperties": False,
        },
    }
    assert (area.text_argument, area.timeout_s) == ("width", 60)
    assert (look_up.name, look_up.timeout_s, look_up.max_concurrent) == ("look", 0.2, 1)


INTEGER = {"type": "integer"}
LISTS = {"type": "array", "items": {"type": "array", "items": INTEGER}}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        pytest.param(str, {"type": "string"}, id="str"),
        pytest.param(bool, {"type": "boolean"}, id="bool"),
        pytest.param(list, {"type": "array"}, id="list"),
        pytest.param(list[list[int]], LISTS, id="lists"),
        pytest.param(dict, {"type": "object"}, id="dict"),
        pytest.param(
            dict[str, int], {"type": "object", "additionalProperties": INTEGER}, id="values"
        ),
        pytest.param(dict[str, Any], {"type": "object"}, id="any values"),
        pytest.param(Literal["a", 2], {"enum": ["a", 2]}, id="literal"),
        pytest.param(
            Optional[int],  # noqa: UP045
            {"anyOf": [INTEGER, {"type": "null"}]},
            id="optional",
        ),
        pytest.param(int | str, {"anyOf": [INTEGER, {"type": "string"}]}, id="union"),
        pytest.param(Any, {}, id="any"),
    ],
)
def test_each_type_hint_has_its_schema(hint, schema):
    def made(x):
        """Made."""

    made.__annotations__ = {"x": hint}
    assert FunctionTool(made).parameters["properties"]["x"] == schema


def without_hint(x):
    pass


def with_varargs(*xs: int):
    pass


def with_bytes(x: bytes):
    pass


ODD_DEFAULT = object()


def with_odd_default(x: Any = ODD_DEFAULT):
    pass


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (without_hint, "no type hint"),
        (with_varargs, "*xs"),
        (with_bytes, bytes),
        (with_odd_default, ODD_DEFAULT),
    ],
    ids=["no hint", "varargs", "type", "default"],
)
def test_a_function_whose_parameters_have_no_json_form_is_refused(function, got):
    assert refused_input(tool, function).got == got


async def test_a_tag_holds_the_one_argument_or_a_json_object():
    @tool
    def two(a: int, b: list[str]) -> dict:
        return {"sum": [*b, a]}

    assert area(2, height=3) == 6
    assert (await call(area, "2.5")).answer == "2.5"
    assert (await call(two, '{"a": 1, "b": ["x"]}')).answer == '{"sum": ["x", 1]}'
    wrong = await call(two, "1 x")
    assert wrong.status is ToolStatus.user_error and "a, b" in wrong.answer


async def test_functions_may_return_values_or_responses_or_raise():
    assert (await call(look_up, "q")).answer == '{"found": "q"}'
    assert (await call(area, "-1")).status is ToolStatus.user_error

    @tool
    def rewarded(x: str) -> ToolResponse:
        return ToolResponse(text=x, step_reward=0.5)

    @tool
    def broken(x: str) -> object:
        return object()

    assert (await call(rewarded, "a")).step_reward == 0.5
    assert (await call(broken, "a")).status is ToolStatus.infra_error


async def test_the_dataset_may_fix_parameters():
    area.check_kwargs({"execute_kwargs": {"height": 4}})
    error = refused_input(area.check_kwargs, {"execute_kwargs": {"depth": 4}})
    assert error.name.endswith(".execute_kwargs") and error.got == ["depth"]
    toolkit = ToolKit([area])
    session = toolkit.open_session()
    await session.create({"area": {"execute_kwargs": {"height": 4}}})
    assert (await session.execute("area", {"width": 2, "height": 9})).answer == "8"


async def test_a_thread_that_hangs_keeps_its_slot_and_delays_nobody():
    go = threading.Event()

    @tool(timeout_s=0.1, max_concurrent=1)
    def wait(x: str) -> str:
        if x == "hang":
            go.wait(600)
        return x

    toolkit = ToolKit([wait])
    session = toolkit.open_session()
    await session.create({})
    assert (await session.execute("wait", {"x": "hang"})).status is ToolStatus.timeout
    wait.timeout_s = 60
    following = asyncio.create_task(session.execute("wait", {"x": "a"}))
    await asyncio.sleep(0.1)
    assert not following.done(), "the slot is taken until the thread ends"
    go.set()
    outcome = await asyncio.wait_for(following, 300)
    assert outcome.answer == "a" and outcome.queue_s > 0.09
    await session.release()
