"""Tests whose coroutines wait for no thread and no process run in virtual time."""

import asyncio

from tests.rollout.virtual_time import VirtualTimeLoop

VIRTUAL_TIME = ("test_mcp_tools.py", "test_retry.py", "test_tool_session.py")


def pytest_asyncio_loop_factories(item):
    if item.path.name in VIRTUAL_TIME:
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}
