"""slurm/node_preflight.py: comparison of nodes, the table, head and nodes over real connections."""

import asyncio

import pytest

from slurm import node_preflight
from slurm.node_checks import FAIL, OK, WARN, Finding
from slurm.node_preflight import (
    PreflightHead,
    check_clock,
    check_connectivity,
    check_shared_folder,
    flag_mismatches,
    format_table,
    run_node_checks,
)
from slurm.ray_cluster import find_port_pair

KEY = "secret"


def test_node_that_differs_from_most_fails():
    findings = {
        node: {"torch": Finding(version), "disk": Finding(free)}
        for node, version, free in [("a", "2.13", "10"), ("b", "2.12", "20"), ("c", "2.13", "30")]
    }
    flagged = flag_mismatches(findings)
    assert [cells["torch"].state for cells in flagged.values()] == [OK, FAIL, OK]
    assert "2.12, 2.13 on 2" in flagged["b"]["torch"].reason
    assert all(cells["disk"].state == OK for cells in flagged.values())
    assert findings["b"]["torch"].state == OK, "the input is not modified"


def test_node_without_an_answer_flags_no_other():
    findings = {"a": {"torch": Finding("2.13")}, "b": {"tcp": Finding("none", FAIL)}}
    assert flag_mismatches(findings) == findings


def test_table_marks_failures_and_says_why():
    text = format_table(
        {
            "n1": {"python": Finding("3.11.9"), "tcp": Finding("2/2")},
            "n2": {"python": Finding("3.12.1", FAIL, "python differs"), "ib": Finding("7", WARN)},
        }
    )
    assert text.splitlines() == [
        "node  python   ib  tcp",
        "n1    3.11.9   -   2/2",
        "n2    3.12.1!  7?  -",
        "FAIL n2 python: python differs",
    ]


@pytest.mark.parametrize(("skew_s", "state"), [(0.2, OK), (-5.0, WARN), (31.0, FAIL)])
def test_skew_of_a_clock_warns_from_one_second_and_fails_from_thirty(skew_s, state):
    assert check_clock(skew_s).state == state


async def test_connectivity_names_the_unreachable_node():
    async with await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0
    ) as there:
        port = there.sockets[0].getsockname()[1]
        peers = {"near": ("127.0.0.1", port), "far": ("127.0.0.1", find_port_pair(7))}
        found = await check_connectivity(peers)
    assert (found.value, found.state) == ("1/2", FAIL)
    assert f"far (127.0.0.1:{peers['far'][1]})" in found.reason
    assert "near" not in found.reason


async def test_missing_or_different_token_means_the_folder_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(node_preflight, "TOKEN_TIMEOUT_S", 0.2)
    token = tmp_path / "token"
    assert (await check_shared_folder(token, "abc")).state == FAIL
    token.write_text("ab")
    assert (await check_shared_folder(token, "abc")).value == "other"
    token.write_text("abc")
    assert (await check_shared_folder(token, "abc")) == Finding("yes")


def short_checks(shared, peers, node):
    return {"limits": lambda: {"limits": Finding("many"), "python": Finding("3.11")}}


async def until_listening(address):
    """Wait until the head accepts connections."""
    host, port = address.split(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return


async def test_head_collects_the_findings_of_all_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(node_preflight, "all_checks", short_checks)
    address = f"127.0.0.1:{find_port_pair(3)}"
    head = PreflightHead(["n1", "n2"], tmp_path, KEY)
    collecting = asyncio.create_task(head.collect(address))
    await until_listening(address)
    nodes = [
        asyncio.create_task(run_node_checks(address, name, KEY, tmp_path)) for name in ("n1", "n2")
    ]
    findings = await asyncio.wait_for(collecting, 300)
    await asyncio.wait_for(asyncio.gather(*nodes), 300)
    for name in ("n1", "n2"):
        cells = findings[name]
        assert set(cells) == {"tcp", "shared", "limits", "python", "clock"}
        assert cells["tcp"].value == "2/2"
        assert {cell.state for cell in cells.values()} == {OK}
    assert not list(tmp_path.iterdir()), "the token is removed"


async def test_missing_node_and_node_with_a_wrong_key_have_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(node_preflight, "all_checks", short_checks)
    address = f"127.0.0.1:{find_port_pair(5)}"
    head = PreflightHead(["n1", "n2"], tmp_path, KEY)
    wait_for = head._wait_for

    async def wait(event, timeout_s):
        """Let the deadline for the nodes pass once n1 is there."""
        if event is not head._all_joined:
            await wait_for(event, timeout_s)
        while "n1" not in head._peers:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(head, "_wait_for", wait)
    collecting = asyncio.create_task(head.collect(address))
    await until_listening(address)
    here = asyncio.create_task(run_node_checks(address, "n1", KEY, tmp_path))
    stranger = asyncio.create_task(run_node_checks(address, "n2", "wrong", tmp_path))
    with pytest.raises(ConnectionError):
        await stranger
    findings = await asyncio.wait_for(collecting, 300)
    await here
    assert findings["n1"]["tcp"].state == OK
    assert findings["n2"]["tcp"].value == "no answer"
    assert "did not reach the head" in findings["n2"]["tcp"].reason
