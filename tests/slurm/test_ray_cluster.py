"""slurm/ray_cluster.py: address of the head, missing and lost nodes, with a fake membership."""

import socket

import pytest
from ray.exceptions import RpcError

from slurm import ray_cluster as module
from slurm.ray_cluster import (
    choose_head_address,
    find_port_pair,
    monitor_cluster,
    wait_for_nodes,
    watch_nodes,
)


class ScriptedMembership:
    """Returns the answers in turn, the last one forever."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def alive_nodes(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "JOIN_INTERVAL_S", 0.01)


def test_jobs_have_separate_ports_and_skip_used_ones():
    first = find_port_pair(17)
    assert 20170 <= first < 20180 or first > 20180
    with socket.socket() as listener:
        listener.bind(("", first + 1))
        assert find_port_pair(17) >= first + 2
    assert find_port_pair(1017) == find_port_pair(17)


def test_configured_head_address_comes_first(monkeypatch):
    monkeypatch.setenv("MEGA_AGENTRL_HEAD_ADDRESS", "10.1.2.3")
    assert choose_head_address(4, ["n1", "n2"]).startswith("10.1.2.3:2004")


def test_wait_ends_when_all_nodes_have_joined_or_names_the_missing_ones():
    joining = ScriptedMembership(None, {"a"}, {"a", "b", "other"})
    assert wait_for_nodes(joining, ["a", "b"], 300) == set()
    assert wait_for_nodes(ScriptedMembership({"a"}), ["a", "b", "c"], 0.1) == {"b", "c"}


def test_watch_names_lost_nodes_and_tolerates_a_short_silence():
    membership = ScriptedMembership({"a", "b"}, None, None, {"a", "b"}, {"a"})
    assert watch_nodes(membership, ["a", "b"]) == {"b"}


def test_watch_gives_up_on_a_silent_head(monkeypatch):
    monkeypatch.setattr(module, "HEAD_TIMEOUT_S", 0.1)
    assert watch_nodes(ScriptedMembership({"a", "b"}, None), ["a", "b"]) == {"a", "b"}


def test_monitor_returns_one_line_with_the_node_names(tmp_path, monkeypatch):
    joined = tmp_path / "joined"
    monkeypatch.setattr(module, "ClusterMembership", lambda _: ScriptedMembership({"n1"}))
    line = monitor_cluster("h:1", joined, 0.0, ["n1", "n2"])
    assert line.startswith("missing after 0 s: node n2; ") and "h:1" in line
    assert not joined.exists()
    both = ScriptedMembership({"n1", "n2"}, {"n1", "n2"}, {"n1"})
    monkeypatch.setattr(module, "ClusterMembership", lambda _: both)
    assert monitor_cluster("h:1", joined, 300.0, ["n1", "n2"]).startswith("node n2 went away")
    assert joined.exists()


def test_unreachable_head_returns_none():
    assert module.ClusterMembership(f"127.0.0.1:{find_port_pair(9)}").alive_nodes() is None


def test_restarted_head_gets_a_new_client(monkeypatch):
    made = []

    class Client:
        def __init__(self, address):
            made.append(address)
            self.calls = 0

        def get_all_node_info(self, **_):
            self.calls += 1
            if self.calls > 1:
                raise RpcError("not the cluster this client knows", rpc_code=0)
            return {}

    monkeypatch.setattr(module, "GcsClient", Client)
    with socket.create_server(("127.0.0.1", 0)) as head:
        membership = module.ClusterMembership(f"127.0.0.1:{head.getsockname()[1]}")
        assert [membership.alive_nodes() for _ in range(3)] == [set(), None, set()]
    assert len(made) == 2
