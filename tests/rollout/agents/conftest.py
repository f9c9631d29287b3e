"""The codec of the gateway's tests."""

import asyncio

import pytest

from mega_agentrl.data.encoding.codec import HFCodec
from tests.chat_models import save_tokenizer


def pytest_asyncio_loop_factories():
    """Coroutines that are tests use real time: they talk over sockets."""
    return {"real": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def codec(tmp_path_factory):
    """A codec with Qwen 3's template, which drops earlier reasoning."""
    return HFCodec(save_tokenizer("qwen3", tmp_path_factory.mktemp("tokenizer")))
