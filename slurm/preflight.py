"""Checks every node of an allocation, and the nodes against each other.

`head ADDRESS NODE...` collects and prints a table, nodes by checks; exit code 1 where a check
failed or a node did not answer. `node ADDRESS NAME` runs on each node, under srun.

Protocol: one TCP connection from each node to the head, a JSON object a line.

    node -> head  {key, node, port}        the node listens at `port` for the others
    head -> node  {now}, node -> head {now}    three times: the clock
    head -> node  {peers, token_file, token}   once all nodes are there, or the deadline has passed
    node -> head  {findings}
    head closes                             when all have answered: the listeners may go

`MEGA_AGENTRL_PREFLIGHT_KEY` holds the key, which keeps other people's connections out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm.node_checks import FAIL, OK, WARN, Finding, all_checks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JOIN_S = 90
CHECK_S = 300
REACH_S = 5
TOKEN_S = 30  # shared file systems may show a new file late
WARN_SKEW_S, MAX_SKEW_S = 1.0, 30.0
# What must be the same on all nodes.
SAME = ("python", "torch", "nccl", "ray", "driver", "gpus", "nvlink", "ib")
COLUMNS = (
    *("python", "imports", "torch", "nccl", "ray", "driver", "gpus", "ecc", "nvlink", "ib"),
    *("shared", "disk", "limits", "clock", "tcp", "bwrap"),
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


class Head:
    """Collects the findings of `nodes`. folder: shared by all nodes, for the token."""

    def __init__(self, nodes: Sequence[str], folder: Path, key: str) -> None:
        self._nodes = list(nodes)
        self._key = key
        self._token = os.urandom(8).hex()
        self._file = folder / f".preflight-{self._token}"
        self._peers: dict[str, tuple[str, int]] = {}
        self._all_here = asyncio.Event()
        self._all_done = asyncio.Event()
        self.findings: dict[str, Findings] = {}

    async def collect(self, address: str) -> dict[str, Findings]:
        """Findings by node; a node that did not come or answer has only `tcp`, which says so."""
        host, _, port = address.rpartition(":")
        self._file.write_text(self._token)
        try:
            async with await asyncio.start_server(self._serve, host, int(port)):
                await self._until(self._all_here, JOIN_S)
                self._all_here.set()
                if self._peers:
                    await self._until(self._all_done, CHECK_S)
        finally:
            self._file.unlink(missing_ok=True)
        for node in self._nodes:
            came = "came, but did not finish" if node in self._peers else "did not reach the head"
            silent = Finding("no answer", FAIL, f"{came} at {address}; see its output below")
            self.findings.setdefault(node, {"tcp": silent})
        return self.findings

    async def _until(self, event: asyncio.Event, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await _receive(reader, REACH_S)
            if hello.get("key") != self._key or hello.get("node") not in self._nodes:
                return
            node = hello["node"]
            skew_s = await self._skew(reader, writer)
            if self._all_here.is_set():
                return
            self._peers[node] = (writer.get_extra_info("peername")[0], hello["port"])
            if len(self._peers) == len(self._nodes):
                self._all_here.set()
            await self._all_here.wait()
            token = {"token_file": str(self._file), "token": self._token}
            await _send(writer, {"peers": self._peers, **token})
            found = (await _receive(reader, CHECK_S))["findings"]
            self.findings[node] = {name: Finding(**cell) for name, cell in found.items()}
            self.findings[node]["clock"] = clock(skew_s)
            if len(self.findings) == len(self._peers):  # nobody joins after `_all_here`
                self._all_done.set()
            await self._all_done.wait()
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _skew(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        """Seconds the node's clock is ahead; from the fastest of three exchanges."""
        best = (float("inf"), 0.0)
        for _ in range(3):
            before_s = time.time()
            await _send(writer, {"now": before_s})
            there_s = float((await _receive(reader, REACH_S))["now"])
            after_s = time.time()
            best = min(best, (after_s - before_s, there_s - (before_s + after_s) / 2))
        return best[1]


def clock(skew_s: float) -> Finding:
    """How far a node's clock is from the head's."""
    value = f"{skew_s:+.2f} s"
    if abs(skew_s) < WARN_SKEW_S:
        return Finding(value)
    state = FAIL if abs(skew_s) > MAX_SKEW_S else WARN
    return Finding(value, state, f"the clock is {skew_s:+.1f} s from the head's; is NTP running?")


async def visit(address: str, node: str, key: str, shared: Path) -> None:
    """The node's side."""
    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(
        lambda _, writer: writer.close(), "0.0.0.0", 0
    ) as listener:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port)), timeout=JOIN_S
        )
        own_port = listener.sockets[0].getsockname()[1]
        await _send(writer, {"key": key, "node": node, "port": own_port})
        while "peers" not in (message := await _receive(reader, 2 * JOIN_S)):
            await _send(writer, {"now": time.time()})
        cells: Findings = {
            "tcp": await reach(message["peers"]),
            "shared": await read_token(Path(message["token_file"]), message["token"]),
        }
        for part in await asyncio.gather(
            *(_within(name, check) for name, check in all_checks(shared).items())
        ):
            cells |= part
        await _send(writer, {"findings": {name: asdict(cell) for name, cell in cells.items()}})
        await asyncio.wait_for(reader.read(), CHECK_S)


async def _within(name: str, check: Any) -> Findings:
    """A check with a deadline: a sick GPU or file system may hold it for ever."""
    try:
        found: Findings = await asyncio.wait_for(asyncio.to_thread(check), CHECK_S - 20)
    except TimeoutError:
        return {name: Finding("stuck", FAIL, f"{name}: no answer within {CHECK_S - 20} s")}
    return found


async def reach(peers: Mapping[str, Sequence[Any]]) -> Finding:
    """How many of the nodes this one can connect to, at the ports they chose."""

    async def try_one(host: str, port: int) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), REACH_S)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    answers = await asyncio.gather(*(try_one(*place) for place in peers.values()))
    lost = [
        f"{node} ({place[0]}:{place[1]})"
        for (node, place), came in zip(peers.items(), answers, strict=True)
        if not came
    ]
    why = f"cannot connect to {', '.join(lost)}; probable cause: a firewall" if lost else ""
    return Finding(f"{sum(answers)}/{len(peers)}", FAIL if lost else OK, why)


async def read_token(file: Path, token: str) -> Finding:
    """Whether the file the head has just written is here, with what is in it."""
    end_s = time.monotonic() + TOKEN_S
    while True:
        try:
            found = await asyncio.to_thread(file.read_text)
        except OSError as error:
            if time.monotonic() < end_s:
                await asyncio.sleep(0.5)
                continue
            why = f"{file.parent} is not the head's: {error}; put the repository on a shared disk"
            return Finding("no", FAIL, why)
        if found == token:
            return Finding("yes")
        return Finding("other", FAIL, f"{file} differs from the head's")


def compare(findings: Mapping[str, Findings]) -> dict[str, Findings]:
    """The same, with a failure where a node differs from most in what must be equal."""
    result = {node: dict(cells) for node, cells in findings.items()}
    for name in SAME:
        values = Counter(cells[name].value for cells in findings.values() if name in cells)
        if len(values) < 2:
            continue
        usual = max(sorted(values), key=lambda value: values[value])
        for cells in result.values():
            if name in cells and cells[name].value != usual:
                why = f"{name} is {cells[name].value}, {usual} on {values[usual]} other nodes"
                cells[name] = Finding(cells[name].value, FAIL, why)
    return result


def table(findings: Mapping[str, Findings]) -> str:
    """Nodes by checks; `!` marks a failure, `?` a warning, and a line below says why."""
    marks = {OK: "", WARN: "?", FAIL: "!"}
    names = [name for name in COLUMNS if any(name in cells for cells in findings.values())]
    rows = [["node", *names]]
    for node, cells in findings.items():
        shown = (cells.get(name, Finding("-")) for name in names)
        rows.append([node, *(cell.value + marks[cell.state] for cell in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for node, cells in findings.items():
        lines += [f"{c.state} {node} {name}: {c.why}" for name, c in cells.items() if c.why]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    key = os.environ.get("MEGA_AGENTRL_PREFLIGHT_KEY", "")
    match arguments:
        case ["head", address, *nodes]:
            head = Head(nodes, Path.cwd(), key)
            collected = asyncio.run(head.collect(address))
            findings = compare({node: collected[node] for node in nodes})
            print(table(findings))
            states = Counter(cell.state for cells in findings.values() for cell in cells.values())
            print(f"{len(nodes)} nodes: {states[FAIL]} failures, {states[WARN]} warnings")
            return 1 if states[FAIL] else 0
        case ["node", address, node]:
            asyncio.run(visit(address, node, key, Path.cwd()))
            sys.stdout.flush()
            os._exit(0)  # a check that hangs has a thread that never ends
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
