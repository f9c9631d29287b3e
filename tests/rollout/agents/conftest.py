"""The codec and the event loops of the gateway's tests."""

from tests.rollout.gateway.conftest import codec, pytest_asyncio_loop_factories

__all__ = ["codec", "pytest_asyncio_loop_factories"]
