"""Free ports are never those that outgoing connections may take."""

import socket
from pathlib import Path

import pytest

from mega_agentrl.runtime import free_port as module
from mega_agentrl.runtime.free_port import FIRST_PORT, free_port, free_ports


@pytest.fixture
def ephemeral_range(monkeypatch, tmp_path):
    """Return a function that sets the kernel's range for outgoing connections."""
    file = tmp_path / "range"
    monkeypatch.setattr(module, "_EPHEMERAL_RANGE", file)
    return lambda first: file.write_text(f"{first}\t60999\n")


def test_ports_lie_below_those_of_outgoing_connections(ephemeral_range):
    ephemeral_range(32_768)
    ports = free_ports(50)
    assert all(FIRST_PORT <= port < 32_768 for port in ports)
    assert len(set(ports)) == 50


def test_used_ports_are_left_out(ephemeral_range, monkeypatch):
    ephemeral_range(32_768)
    with socket.socket() as listener:
        listener.bind(("", free_port()))
        listener.listen()
        used = listener.getsockname()[1]
        monkeypatch.setattr(
            module.random.SystemRandom, "randrange", lambda *_, tries=[used + 1, used]: tries.pop()
        )
        assert free_port() == used + 1


@pytest.mark.parametrize("first", [1024, FIRST_PORT + 10])
def test_kernel_chooses_where_its_range_begins_early(ephemeral_range, first):
    ephemeral_range(first)
    with socket.socket() as server:
        server.bind(("", free_port()))


def test_kernel_chooses_where_its_range_is_unknown(monkeypatch):
    monkeypatch.setattr(module, "_EPHEMERAL_RANGE", Path("/no/such/file"))
    with socket.socket() as server:
        server.bind(("", free_port()))
