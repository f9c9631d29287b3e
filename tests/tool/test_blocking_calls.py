"""Work on the arguments of a call runs on the event loop, or in a thread if they are many."""

import threading

import pytest

from mega_agentrl.tool.blocking_calls import call_on_arguments
from mega_agentrl.tool.call_protocol.json_text import MAX_LOOP_VALUES

MANY = MAX_LOOP_VALUES + 1
NESTED = [[0] * (MANY // 30)] * 30


@pytest.mark.parametrize(
    ("arguments", "in_thread"),
    [
        pytest.param({"a": "x" * (1 << 20), "b": [{"c": 1}] * 10}, False, id="few"),
        pytest.param({str(number): 0 for number in range(MANY)}, True, id="many_keys"),
        pytest.param({"a": [0] * MANY}, True, id="long_list"),
        pytest.param({"a": {"b": NESTED}}, True, id="many_lists"),
        pytest.param({"a": [{}] * MANY}, True, id="empty_objects"),
    ],
)
async def test_many_values_are_worked_on_in_a_thread_and_few_on_the_event_loop(
    arguments, in_thread
):
    thread = await call_on_arguments(arguments, threading.get_ident)
    assert (thread != threading.get_ident()) is in_thread
