"""The Python tool against the released behaviour."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.tool.python import EMPTY_ANSWER, PythonTool, print_last_expression
from mega_agentrl.types.records import ToolStatus

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "python_tool.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def tool():
    made = PythonTool(PythonToolConfig(workers=1, preload=[], timeout_s=20))
    asyncio.run(made.start())
    yield made
    made.close_now()


@pytest.mark.parametrize("row", GOLDEN["preprocess"], ids=lambda row: repr(row["code"]))
def test_released_rewriting(row):
    assert print_last_expression(row["code"]) == row["rewritten"]


@pytest.mark.parametrize("row", GOLDEN["execute"], ids=lambda row: repr(row["code"]))
async def test_released_execution(tool, row):
    answer = await tool.execute(None, {"code": row["code"]}, {"timeout_s": row["timeout"]})
    if row["code"] == "while True: pass":  # the released text is Chinese
        assert answer.status is ToolStatus.timeout
        assert answer.text == "Timed out after 1 s."
    else:
        assert answer.text.splitlines()[-1:] == (row["output"] or EMPTY_ANSWER).splitlines()[-1:]
        failed = "raise" in row["code"] or "exit(3)" in row["code"]
        assert answer.status is (ToolStatus.user_error if failed else ToolStatus.ok)


async def test_last_expression_is_answered(tool):
    assert (await tool.execute(None, {"code": "x = 6\nx * 7"}, {})).text == "42"


async def test_long_and_deep_code_is_an_error_not_a_crash(tool):
    for code in ("(" * 5000 + ")" * 5000, "-" * 20000 + "1", "a\0b", "\ud800", "x = 1\n" * 50000):
        answer = await tool.execute(None, {"code": code}, {})
        assert answer.status in (ToolStatus.ok, ToolStatus.user_error)


@given(st.text(max_size=60))
def test_rewriting_never_raises_and_settles(code):
    once = print_last_expression(code)
    assert print_last_expression(once) == once
