"""slurm/preflight.py: nodes against each other, the table, and the whole over real connections."""

import asyncio

import pytest

from slurm import preflight
from slurm.node_checks import FAIL, OK, WARN, Finding
from slurm.preflight import Head, clock, compare, reach, read_token, table, visit
from slurm.ray_members import free_ports

KEY = "secret"


def test_compare_fails_the_node_that_differs_from_most():
    findings = {
        node: {"torch": Finding(version), "disk": Finding(free)}
        for node, version, free in [("a", "2.13", "10"), ("b", "2.12", "20"), ("c", "2.13", "30")]
    }
    compared = compare(findings)
    assert [cells["torch"].state for cells in compared.values()] == [OK, FAIL, OK]
    assert compared["b"]["torch"].why == "torch is 2.12, 2.13 on 2 other nodes"
    assert all(cells["disk"].state == OK for cells in compared.values())
    assert findings["b"]["torch"].state == OK, "the input is left alone"


def test_compare_takes_a_node_without_an_answer():
    compared = compare({"a": {"torch": Finding("2.13")}, "b": {"tcp": Finding("none", FAIL)}})
    assert compared["a"]["torch"].state == OK


def test_table_marks_failures_and_says_why():
    text = table(
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
def test_clock(skew_s, state):
    assert clock(skew_s).state == state


async def test_reach_names_the_node_and_place_it_cannot_connect_to():
    async with await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0
    ) as there:
        port = there.sockets[0].getsockname()[1]
        peers = {"near": ("127.0.0.1", port), "far": ("127.0.0.1", free_ports(7))}
        found = await reach(peers)
    assert (found.value, found.state) == ("1/2", FAIL)
    assert f"far (127.0.0.1:{peers['far'][1]})" in found.why
    assert "near" not in found.why


async def test_a_file_that_is_missing_or_different_here_means_the_folder_is_not_shared(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "TOKEN_S", 0.2)
    token = tmp_path / "token"
    assert (await read_token(token, "abc")).state == FAIL
    token.write_text("ab")
    assert (await read_token(token, "abc")).value == "other"
    token.write_text("abc")
    assert (await read_token(token, "abc")) == Finding("yes")


def short_checks(shared):
    return {"limits": lambda: {"limits": Finding("many"), "python": Finding("3.11")}}


async def test_head_and_nodes_together(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "all_checks", short_checks)
    address = f"127.0.0.1:{free_ports(3)}"
    head = Head(["n1", "n2"], tmp_path, KEY)
    collecting = asyncio.create_task(head.collect(address))
    await asyncio.sleep(0.2)
    nodes = [asyncio.create_task(visit(address, name, KEY, tmp_path)) for name in ("n1", "n2")]
    findings = await asyncio.wait_for(collecting, 20)
    await asyncio.wait_for(asyncio.gather(*nodes), 20)
    for name in ("n1", "n2"):
        cells = findings[name]
        assert set(cells) == {"tcp", "shared", "limits", "python", "clock"}
        assert cells["tcp"].value == "2/2"
        assert {cell.state for cell in cells.values()} == {OK}
    assert not list(tmp_path.iterdir()), "the token is removed"


async def test_a_node_that_never_comes_and_a_stranger(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "all_checks", short_checks)
    monkeypatch.setattr(preflight, "JOIN_S", 1)
    monkeypatch.setattr(preflight, "CHECK_S", 22)
    address = f"127.0.0.1:{free_ports(5)}"
    head = Head(["n1", "n2"], tmp_path, KEY)
    collecting = asyncio.create_task(head.collect(address))
    await asyncio.sleep(0.2)
    here = asyncio.create_task(visit(address, "n1", KEY, tmp_path))
    stranger = asyncio.create_task(visit(address, "n2", "wrong", tmp_path))
    with pytest.raises(ConnectionError):
        await stranger
    findings = await asyncio.wait_for(collecting, 40)
    await here
    assert findings["n1"]["tcp"].state == OK
    assert findings["n2"]["tcp"].value == "no answer"
    assert "did not reach the head" in findings["n2"]["tcp"].why
