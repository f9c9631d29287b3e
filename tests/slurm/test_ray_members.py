"""slurm/ray_members.py: the head's place, and who is missing, against a directory of our own."""

import socket

import pytest
from ray.exceptions import RpcError

from slurm import ray_members
from slurm.ray_members import follow, free_ports, place, wait, watch


class ScriptedDirectory:
    """Answers in turn; the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def alive(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ray_members, "PERIOD_S", 0.01)
    monkeypatch.setattr(ray_members, "SILENCE_S", 0.3)


def test_jobs_have_ports_of_their_own_and_taken_ones_are_left_out():
    first = free_ports(17)
    assert 20170 <= first < 20180 or first > 20180
    with socket.socket() as taken:
        taken.bind(("", first + 1))
        assert free_ports(17) >= first + 2
    assert free_ports(1017) == free_ports(17)


def test_the_sites_address_comes_first(monkeypatch):
    monkeypatch.setenv("MEGA_AGENTRL_HEAD_ADDRESS", "10.1.2.3")
    assert place(4, ["n1", "n2"]).startswith("10.1.2.3:2004")


def test_wait_ends_as_soon_as_all_are_there():
    directory = ScriptedDirectory(None, {"a"}, {"a", "b", "other"})
    assert wait(directory, ["a", "b"], 30) == set()


def test_wait_names_those_missing_at_the_deadline():
    assert wait(ScriptedDirectory(None, {"a"}), ["a", "b", "c"], 0.1) == {"b", "c"}


def test_watch_names_who_left_and_forgives_a_short_silence():
    directory = ScriptedDirectory({"a", "b"}, None, None, {"a", "b"}, {"a"})
    assert watch(directory, ["a", "b"]) == {"b"}


def test_watch_gives_up_on_a_head_that_stays_silent():
    assert watch(ScriptedDirectory({"a", "b"}, None), ["a", "b"]) == {"a", "b"}


def test_follow_says_one_line_with_the_names(tmp_path, monkeypatch):
    joined = tmp_path / "joined"
    monkeypatch.setattr(ray_members, "Directory", lambda _: ScriptedDirectory({"n1"}))
    line = follow("h:1", joined, 0.0, ["n1", "n2"])
    assert line.startswith("missing after 0 s: node n2; Ray there did not join h:1")
    assert not joined.exists()
    both = ScriptedDirectory({"n1", "n2"}, {"n1", "n2"}, {"n1"})
    monkeypatch.setattr(ray_members, "Directory", lambda _: both)
    assert follow("h:1", joined, 5.0, ["n1", "n2"]).startswith("node n2 went away")
    assert joined.exists()


def test_a_head_that_is_not_there_does_not_answer():
    assert ray_members.Directory(f"127.0.0.1:{free_ports(9)}").alive() is None


def test_a_head_that_was_started_again_is_asked_by_a_new_client(monkeypatch):
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

    monkeypatch.setattr(ray_members, "GcsClient", Client)
    with socket.create_server(("127.0.0.1", 0)) as head:
        directory = ray_members.Directory(f"127.0.0.1:{head.getsockname()[1]}")
        assert [directory.alive() for _ in range(3)] == [set(), None, set()]
    assert len(made) == 2
