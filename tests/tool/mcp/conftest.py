"""Servers without processes are tested in virtual time."""

import asyncio

from tests.rollout.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories(item):
    if item.path.name == "test_mcp_tools.py":
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}
