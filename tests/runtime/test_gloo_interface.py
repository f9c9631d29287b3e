"""The interface of gloo is the one with the node's Ray address, or the user's."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from mega_agentrl.reshard.transports.gloo import GlooTransport
from mega_agentrl.runtime.gloo_interface import use_interface_of


@pytest.fixture
def no_choice(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the test's own change is undone
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


@pytest.mark.usefixtures("no_choice")
def test_interface_with_the_address_is_used_and_joins_ranks():
    assert use_interface_of("127.0.0.1") == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(lambda rank: GlooTransport.join(store, rank, 2, 300.0), range(2)))
    for transport in joined:
        transport.close()


@pytest.mark.usefixtures("no_choice")
def test_address_of_no_interface_leaves_the_choice_to_gloo():
    assert use_interface_of("198.51.100.7") == ""
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_interface_of_the_user_comes_first(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert use_interface_of("127.0.0.1") == "ib0"
