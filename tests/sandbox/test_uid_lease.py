"""Leases of user ids: unique, and released when the launcher dies."""

import os
import subprocess
import sys

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox import uid_lease
from mega_agentrl.sandbox.uid_lease import UID_RANGE, lease_uid, needs_dedicated_uid

needs_root = pytest.mark.skipif(
    not needs_dedicated_uid(), reason="only the host's root switches users"
)


@needs_root
def test_nobody_shares_a_user():
    leases = [lease_uid() for _ in range(3)]
    uids = [user.uid for user in leases]
    assert len(set(uids)) == 3
    assert all(number in UID_RANGE for number in uids)
    program = (
        "from mega_agentrl.sandbox.uid_lease import lease_uid\n"
        "print(lease_uid().uid, flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other_uid = int(other.stdout.readline())
        assert other_uid not in uids
        other.kill()
    for user in leases:
        user.close()
        user.close()
    more_leases = [lease_uid() for _ in range(4)]
    assert len({user.uid for user in more_leases}) == 4
    for user in more_leases:
        user.close()


@needs_root
@pytest.mark.parametrize(
    ("namespaces", "is_free"),
    [(["--mount"], False), (["--net"], False), (["--mount", "--net"], True)],
    ids=["own_files", "own_network", "own_files_and_network"],
)
def test_a_launcher_in_a_container_leases_another_id(namespaces, is_free):
    program = (
        "from mega_agentrl.errors import InputError\n"
        "from mega_agentrl.sandbox import uid_lease\n"
        "uid_lease.UID_RANGE = range({0}, {0} + 1)\n"
        "try: print(uid_lease.lease_uid().uid)\n"
        "except InputError as error: print(error.name)"
    )
    lease = lease_uid()
    hide_files = "mount -t tmpfs tmpfs /run && " if "--mount" in namespaces else ""
    command = ["unshare", *namespaces, "sh", "-c", f'{hide_files}exec "$@"', "sh"]
    command += [sys.executable, "-c", program.format(lease.uid)]
    answer = subprocess.check_output(command, text=True).strip()
    lease.close()
    assert answer == (str(lease.uid) if is_free else "free user ids for sandboxes")


@needs_root
def test_a_lease_fails_if_all_user_ids_are_in_use(monkeypatch):
    monkeypatch.setattr(uid_lease, "UID_RANGE", range(60706, 60706))
    with pytest.raises(InputError) as caught:
        lease_uid()
    assert caught.value.name == "free user ids for sandboxes"


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
    monkeypatch.setattr(uid_lease, "_UID_MAP", table)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert needs_dedicated_uid() is needed
    if not needed:
        assert lease_uid() is None
