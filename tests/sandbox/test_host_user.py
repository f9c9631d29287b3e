"""Users of sandboxes: one each, freed with their launcher."""

import os
import subprocess
import sys

import pytest

from mega_agentrl.sandbox import host_user
from mega_agentrl.sandbox.host_user import USERS, is_needed, take_user

needs_root = pytest.mark.skipif(not is_needed(), reason="only the host's root switches users")


@needs_root
def test_nobody_shares_a_user():
    users = [take_user() for _ in range(3)]
    numbers = [user.number for user in users]
    assert len(set(numbers)) == 3
    assert all(number in USERS for number in numbers)
    program = (
        "from mega_agentrl.sandbox.host_user import take_user\n"
        "print(take_user().number, flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        theirs = int(other.stdout.readline())
        assert theirs not in numbers
        other.kill()
    for user in users:
        user.close()
        user.close()
    again = [take_user() for _ in range(4)]
    assert len({user.number for user in again}) == 4
    for user in again:
        user.close()


@needs_root
def test_none_left_is_said(monkeypatch):
    monkeypatch.setattr(host_user, "USERS", range(60706, 60706))
    with pytest.raises(ValueError, match="no free user id"):
        take_user()


@pytest.mark.parametrize(
    ("uid", "lines", "needed"),
    [
        (0, "0 0 4294967295\n", True),
        (1000, "0 0 4294967295\n", False),
        (0, "0 1000 1\n", False),  # root in a container of a plain user's
        (0, "0 100000 65536\n", False),
    ],
)
def test_only_the_hosts_root_needs_one(monkeypatch, tmp_path, uid, lines, needed):
    table = tmp_path / "uid_map"
    table.write_text(lines, encoding="ascii")
    monkeypatch.setattr(host_user, "_UID_MAP", table)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert is_needed() is needed
    if not needed:
        assert take_user() is None
