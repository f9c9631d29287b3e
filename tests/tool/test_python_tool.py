"""The Python tool against ARPO's released behaviour, and its stateful mode."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.tool.python import EMPTY_OUTPUT_MESSAGE, PythonTool, print_last_expression
from mega_agentrl.types.records import ToolStatus

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "python_tool.json").read_text(encoding="utf-8")
)


def started(**changes):
    made = PythonTool(PythonToolConfig(preload_modules=[], timeout_s=60, **changes))
    asyncio.run(made.start())
    yield made
    made.close_now()


@pytest.fixture(scope="module")
def tool():
    yield from started(num_workers=1)


@pytest.fixture(scope="module")
def stateful():
    yield from started(num_workers=2, mode=PythonMode.stateful)


@pytest.mark.parametrize("row", GOLDEN["preprocess"])
def test_code_is_rewritten_as_in_the_released_tool(row):
    assert print_last_expression(row["code"]) == row["rewritten"]


@pytest.mark.parametrize("row", GOLDEN["execute"])
async def test_code_runs_as_in_the_released_tool(tool, row):
    answer = await tool.execute(None, {"code": row["code"]}, {"timeout_s": row["timeout"]})
    if row["code"] == "while True: pass":  # the released text is Chinese
        assert answer.status is ToolStatus.timeout
        assert answer.text == "Timed out after 1 s."
    else:
        assert (
            answer.text.splitlines()[-1:]
            == (row["output"] or EMPTY_OUTPUT_MESSAGE).splitlines()[-1:]
        )
        failed = "raise" in row["code"] or "exit(3)" in row["code"]
        assert answer.status is (ToolStatus.user_error if failed else ToolStatus.ok)


@pytest.mark.extended
async def test_long_and_deep_code_is_an_error_not_a_crash(tool):
    for code in ("(" * 5000 + ")" * 5000, "-" * 20000 + "1", "a\0b", "\ud800", "x = 1\n" * 50000):
        answer = await tool.execute(None, {"code": code}, {})
        assert answer.status in (ToolStatus.ok, ToolStatus.user_error)


@given(st.text(max_size=60))
def test_rewriting_never_raises_and_twice_is_as_once(code):
    once = print_last_expression(code)
    assert print_last_expression(once) == once


async def test_without_a_memory_there_is_no_state(tool):
    assert await tool.create({}) is None
    assert await tool.fork(None) is None
    await tool.release(None, {})
    await tool.execute(None, {"code": "x = 1"}, {})
    after = await tool.execute(None, {"code": "x"}, {})
    assert after.status is ToolStatus.user_error
    assert "NameError" in after.text


async def test_calls_share_state_and_a_fork_continues_from_it(stateful):
    state = await stateful.create({})
    first = await stateful.execute(state, {"code": "x = [1]"}, {})
    assert (first.text, first.status) == (EMPTY_OUTPUT_MESSAGE, ToolStatus.ok)
    fork = await stateful.fork(state)
    await stateful.execute(fork, {"code": "x.append(2)"}, {})
    await stateful.execute(state, {"code": "x.append(3)"}, {})
    answers = [await stateful.execute(one, {"code": "x"}, {}) for one in (state, fork)]
    assert [answer.text for answer in answers] == ["[1, 3]", "[1, 2]"]
    await stateful.release(state, {})
    assert (await stateful.execute(fork, {"code": "len(x)"}, {})).text == "2"
    await stateful.release(fork, {})
    ended = await stateful.execute(fork, {"code": "x"}, {})
    assert ended.status is ToolStatus.infra_error
