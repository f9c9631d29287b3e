"""Check every node of an allocation, and the connections between them.

`head ADDRESS NODE...` collects the results and prints a table of nodes by checks; the exit code is
1 if a check failed or a node did not answer. `node ADDRESS NAME` runs on each node, under srun.

Protocol: one TCP connection from each node to the head, one JSON object per line.

    node -> head  {key, node, port, store_port}  it listens at `port`; `store_port` is free
    head -> node  {now}, node -> head {now}    three times, to compare the clocks
    head -> node  {peers, token_file, token}   when all nodes are there or the deadline has passed
    node -> head  {findings}
    head closes                             when all have answered: the listeners may close

The head accepts only connections with the key in `MEGA_AGENTRL_PREFLIGHT_KEY`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm.node_checks import (
    FAIL,
    OK,
    WARN,
    Finding,
    check_disk,
    check_gpus,
    check_infiniband,
    check_limits,
)
from slurm.node_probes import check_compiler, check_gloo, check_imports, check_sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

JOIN_TIMEOUT_S = 90
CHECK_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 15  # a busy node answers late
TOKEN_TIMEOUT_S = 30  # shared file systems may show a new file late
WARN_SKEW_S, MAX_SKEW_S = 1.0, 30.0
# Columns whose values must be equal on all nodes.
MUST_MATCH = ("python", "torch", "nccl", "ray", "driver", "gpus", "nvlink", "ib")
COLUMNS = (
    *("python", "imports", "torch", "nccl", "ray", "driver", "gpus", "ecc", "nvlink", "ib"),
    *("compile", "shared", "disk", "limits", "clock", "tcp", "gloo", "bwrap"),
)

Findings = dict[str, Finding]


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _receive(reader: asyncio.StreamReader, timeout_s: float) -> dict[str, Any]:
    line = await asyncio.wait_for(reader.readline(), timeout_s)
    if not line:
        raise ConnectionError("the other side has closed")
    message: dict[str, Any] = json.loads(line)
    return message


class PreflightHead:
    """Collects the findings of all nodes."""

    def __init__(self, nodes: Sequence[str], folder: Path, key: str) -> None:
        """Create the head; `collect` starts listening.

        Args:
            nodes: Names of the expected nodes.
            folder: Folder that all nodes share, for the token file.
            key: Key that the nodes must send.
        """
        self._node_names = list(nodes)
        self._key = key
        self._token = os.urandom(8).hex()
        self._token_file = folder / f".preflight-{self._token}"
        self._peers: dict[str, tuple[str, int, int]] = {}
        self._all_joined = asyncio.Event()
        self._all_done = asyncio.Event()
        self.findings: dict[str, Findings] = {}

    async def collect(self, address: str) -> dict[str, Findings]:
        """Listen at `address` and return the findings by node.

        A node that did not connect or answer has only the column `tcp`, with the reason.
        """
        host, _, port = address.rpartition(":")
        self._token_file.write_text(self._token)
        try:
            async with await asyncio.start_server(self._handle_node, host, int(port)):
                await self._wait_for(self._all_joined, JOIN_TIMEOUT_S)
                self._all_joined.set()
                if self._peers:
                    await self._wait_for(self._all_done, CHECK_TIMEOUT_S)
        finally:
            self._token_file.unlink(missing_ok=True)
        for node in self._node_names:
            status = (
                "did not finish its checks" if node in self._peers else "did not reach the head"
            )
            reason = f"the node {status} (at {address}); see its output below"
            self.findings.setdefault(node, {"tcp": Finding("no answer", FAIL, reason)})
        return self.findings

    async def _wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return

    async def _handle_node(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            greeting = await _receive(reader, CONNECT_TIMEOUT_S)
            if greeting.get("key") != self._key or greeting.get("node") not in self._node_names:
                return
            node = greeting["node"]
            skew_s = await self._measure_clock_skew(reader, writer)
            if self._all_joined.is_set():
                return
            host = writer.get_extra_info("peername")[0]
            self._peers[node] = (host, greeting["port"], greeting["store_port"])
            if len(self._peers) == len(self._node_names):
                self._all_joined.set()
            await self._all_joined.wait()
            token = {"token_file": str(self._token_file), "token": self._token}
            await _send(writer, {"peers": self._peers, **token})
            reply = (await _receive(reader, CHECK_TIMEOUT_S))["findings"]
            self.findings[node] = {name: Finding(**cell) for name, cell in reply.items()}
            self.findings[node]["clock"] = check_clock(skew_s)
            if len(self.findings) == len(self._peers):  # no node joins after `_all_joined`
                self._all_done.set()
            await self._all_done.wait()
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _measure_clock_skew(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> float:
        """Return how many seconds the node's clock is ahead, by the fastest of three exchanges."""
        best = (float("inf"), 0.0)
        for _ in range(3):
            before_s = time.time()
            await _send(writer, {"now": before_s})
            node_time_s = float((await _receive(reader, CONNECT_TIMEOUT_S))["now"])
            after_s = time.time()
            best = min(best, (after_s - before_s, node_time_s - (before_s + after_s) / 2))
        return best[1]


def check_clock(skew_s: float) -> Finding:
    """Check the difference between a node's clock and the head's."""
    value = f"{skew_s:+.2f} s"
    if abs(skew_s) < WARN_SKEW_S:
        return Finding(value)
    state = FAIL if abs(skew_s) > MAX_SKEW_S else WARN
    return Finding(value, state, f"the clock is {skew_s:+.1f} s from the head's; is NTP running?")


async def run_node_checks(address: str, node: str, key: str, shared: Path) -> None:
    """Run all checks on this node and send the findings to the head."""
    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(
        lambda _, writer: writer.close(), "0.0.0.0", 0
    ) as listener:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port)), timeout=JOIN_TIMEOUT_S
        )
        own_port = listener.sockets[0].getsockname()[1]
        ports = {"port": own_port, "store_port": _free_port()}
        await _send(writer, {"key": key, "node": node, **ports})
        while "peers" not in (message := await _receive(reader, 2 * JOIN_TIMEOUT_S)):
            await _send(writer, {"now": time.time()})
        cells: Findings = {
            "tcp": await check_connectivity(message["peers"]),
            "shared": await check_shared_folder(Path(message["token_file"]), message["token"]),
        }
        checks = all_checks(shared, message["peers"], node)
        for check_cells in await asyncio.gather(
            *(_run_with_timeout(name, check) for name, check in checks.items())
        ):
            cells |= check_cells
        await _send(writer, {"findings": {name: asdict(cell) for name, cell in cells.items()}})
        await asyncio.wait_for(reader.read(), CHECK_TIMEOUT_S)


def all_checks(
    shared: Path, peers: Mapping[str, Sequence[Any]], node: str
) -> dict[str, Callable[[], Findings]]:
    """Return the checks of this node by name; each returns some columns of the table.

    Args:
        shared: Folder that all nodes share.
        peers: Address and ports of all nodes by name, in the same order on all of them.
        node: Name of this node.
    """
    local = Path(os.environ.get("MEGA_AGENTRL_LOCAL_DIR") or tempfile.gettempdir())
    num_ib_devices = len(list(Path("/sys/class/infiniband").glob("*")))
    return {
        "imports": check_imports,
        "gpus": check_gpus,
        "compile": lambda: {"compile": check_compiler()},
        "ib": lambda: {"ib": check_infiniband()},
        "disk": lambda: {"disk": check_disk(shared, local)},
        "limits": lambda: {"limits": check_limits(num_ib_devices)},
        "gloo": lambda: {"gloo": check_gloo(peers, node)},
        "bwrap": lambda: {"bwrap": check_sandbox()},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


async def _run_with_timeout(name: str, check: Any) -> Findings:
    """Run a check with a timeout, because a broken GPU or file system may block it forever."""
    try:
        findings: Findings = await asyncio.wait_for(asyncio.to_thread(check), CHECK_TIMEOUT_S - 20)
    except TimeoutError:
        return {name: Finding("stuck", FAIL, f"{name}: no answer within {CHECK_TIMEOUT_S - 20} s")}
    return findings


async def check_connectivity(peers: Mapping[str, Sequence[Any]]) -> Finding:
    """Check how many nodes this one can connect to, at the ports that they chose."""

    async def can_connect(host: str, port: int) -> bool:
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port), CONNECT_TIMEOUT_S
            )
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    answers = await asyncio.gather(*(can_connect(*address[:2]) for address in peers.values()))
    unreachable = [
        f"{node} ({address[0]}:{address[1]})"
        for (node, address), is_reachable in zip(peers.items(), answers, strict=True)
        if not is_reachable
    ]
    reason = (
        f"cannot connect to {', '.join(unreachable)}; probable cause: a firewall"
        if unreachable
        else ""
    )
    return Finding(f"{sum(answers)}/{len(peers)}", FAIL if unreachable else OK, reason)


async def check_shared_folder(file: Path, token: str) -> Finding:
    """Check that the file which the head has just written is visible here with its content."""
    end_s = time.monotonic() + TOKEN_TIMEOUT_S
    while True:
        try:
            content = await asyncio.to_thread(file.read_text)
        except OSError as error:
            if time.monotonic() < end_s:
                await asyncio.sleep(0.5)
                continue
            reason = f"{error}: {file.parent} is not shared; put the repository on a shared disk"
            return Finding("no", FAIL, reason)
        if content == token:
            return Finding("yes")
        return Finding("other", FAIL, f"{file} differs from the head's")


def flag_mismatches(findings: Mapping[str, Findings]) -> dict[str, Findings]:
    """Return the findings with failures where a node differs from most others."""
    result = {node: dict(cells) for node, cells in findings.items()}
    for name in MUST_MATCH:
        values = Counter(cells[name].value for cells in findings.values() if name in cells)
        if len(values) < 2:
            continue
        common = max(sorted(values), key=lambda value: values[value])
        for cells in result.values():
            if name in cells and cells[name].value != common:
                reason = f"{name} is {cells[name].value}, {common} on {values[common]} other nodes"
                cells[name] = Finding(cells[name].value, FAIL, reason)
    return result


def format_table(findings: Mapping[str, Findings]) -> str:
    """Return the table as text; `!` marks a failure and `?` a warning, explained below it."""
    suffix_by_state = {OK: "", WARN: "?", FAIL: "!"}
    columns = [name for name in COLUMNS if any(name in cells for cells in findings.values())]
    rows = [["node", *columns]]
    for node, cells in findings.items():
        row = (cells.get(name, Finding("-")) for name in columns)
        rows.append([node, *(cell.value + suffix_by_state[cell.state] for cell in row)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for node, cells in findings.items():
        lines += [f"{c.state} {node} {name}: {c.reason}" for name, c in cells.items() if c.reason]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command line of the module docstring; return the exit code."""
    key = os.environ.get("MEGA_AGENTRL_PREFLIGHT_KEY", "")
    match arguments:
        case ["head", address, *nodes]:
            head = PreflightHead(nodes, Path.cwd(), key)
            collected = asyncio.run(head.collect(address))
            findings = flag_mismatches({node: collected[node] for node in nodes})
            print(format_table(findings))
            states = Counter(cell.state for cells in findings.values() for cell in cells.values())
            print(f"{len(nodes)} nodes: {states[FAIL]} failures, {states[WARN]} warnings")
            return 1 if states[FAIL] else 0
        case ["node", address, node]:
            asyncio.run(run_node_checks(address, node, key, Path.cwd()))
            sys.stdout.flush()
            os._exit(0)  # a hanging check leaves a thread that would block the exit
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
