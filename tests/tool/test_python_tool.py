"""The Python tool against the released behaviour."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.client import SandboxResult
from mega_agentrl.sandbox.session import STATE_LOST_NOTE
from mega_agentrl.tool.python import EMPTY_OUTPUT_MESSAGE, PythonTool, print_last_expression
from mega_agentrl.types.records import ToolStatus

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "python_tool.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def tool():
    made = PythonTool(PythonToolConfig(num_workers=1, preload_modules=[], timeout_s=20))
    asyncio.run(made.start())
    yield made
    made.close_now()


@pytest.fixture(scope="module")
def stateful():
    config = PythonToolConfig(
        mode=PythonMode.stateful, num_workers=2, preload_modules=[], timeout_s=20
    )
    made = PythonTool(config)
    asyncio.run(made.start())
    yield made
    made.close_now()


@pytest.mark.parametrize("row", GOLDEN["preprocess"])
def test_released_rewriting(row):
    assert print_last_expression(row["code"]) == row["rewritten"]


@pytest.mark.parametrize("row", GOLDEN["execute"])
async def test_released_execution(tool, row):
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


async def test_without_a_memory_there_is_no_state(tool):
    assert await tool.create({}) is None
    assert await tool.fork(None) is None
    await tool.release(None, {})
    await tool.execute(None, {"code": "x = 1"}, {})
    after = await tool.execute(None, {"code": "x"}, {})
    assert after.status is ToolStatus.user_error
    assert "NameError" in after.text
    assert after.metrics["state_lost"] == 0.0


async def test_calls_share_state_and_a_fork_continues_from_it(stateful):
    state = await stateful.create({})
    first = await stateful.execute(state, {"code": "x = [1]"}, {})
    assert (first.text, first.status) == (EMPTY_OUTPUT_MESSAGE, ToolStatus.ok)
    fork = await stateful.fork(state)
    await stateful.execute(fork, {"code": "x.append(2)"}, {})
    await stateful.execute(state, {"code": "x.append(3)"}, {})
    answers = [await stateful.execute(one, {"code": "x"}, {}) for one in (state, fork)]
    assert [answer.text for answer in answers] == ["[1, 3]", "[1, 2]"]
    assert [answer.metrics["state_lost"] for answer in answers] == [0.0, 0.0]
    await stateful.release(state, {})
    assert (await stateful.execute(fork, {"code": "len(x)"}, {})).text == "2"
    await stateful.release(fork, {})
    ended = await stateful.execute(fork, {"code": "x"}, {})
    assert ended.status is ToolStatus.infra_error


async def test_a_lost_state_is_reported_once(stateful):
    state = await stateful.create({})
    await stateful.execute(state, {"code": "x = 1"}, {})
    slow = await stateful.execute(
        state, {"code": "import time; time.sleep(30)"}, {"timeout_s": 0.5}
    )
    assert slow.status is ToolStatus.timeout
    lost = await stateful.execute(state, {"code": "'x' in dir()"}, {})
    assert lost.text == f"{STATE_LOST_NOTE}\nFalse"
    assert lost.metrics["state_lost"] == 1.0
    again = await stateful.execute(state, {"code": "1"}, {})
    assert (again.text, again.metrics["state_lost"]) == ("1", 0.0)
    await stateful.release(state, {})


class Elsewhere:
    """Sandboxes that are not this process's own."""

    num_replaced = 0

    def __init__(self):
        self.calls = []

    async def start(self):
        self.calls.append("start")

    async def run(self, code, timeout_s=None):
        self.calls.append((code, timeout_s))
        return SandboxResult(status=ToolStatus.ok, output="there", latency_s=0.5)

    async def close(self):
        self.calls.append("close")

    def close_now(self):
        self.calls.append("close_now")


async def test_it_works_in_the_sandboxes_it_is_given():
    given = Elsewhere()
    tool = PythonTool(PythonToolConfig(), given)
    await tool.start()
    answer = await tool.execute(None, {"code": "6 * 7"}, {"timeout_s": 3.0})
    assert (answer.text, answer.metrics["run_s"]) == ("there", 0.5)
    await tool.close()
    tool.close_now()
    assert given.calls == ["start", ("print(6 * 7)", 3.0), "close", "close_now"]
