"""Coroutines that are tests run in virtual time."""

from tests.rollout.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories():
    return {"virtual": VirtualTimeLoop}
