"""Soaks the gateway and the sandboxes in hostile work, and checks that nothing of it stays.

    python tools/soak.py [--quick] [--parts NAME ...] [--seed K] [--scale F]

A part is a number of hostile requests, connections, sessions or forks. Before and after it the
resources of this process are read, which plays the driver; attackers are a process of their own,
and a neighbour is a third, which asks the same question of its own session twenty times a second
throughout. Each part prints one JSON line:

    soak, count, seconds      what was done
    descriptors, threads, processes, control_groups
                              before and after, which must be equal
    private_mib               before and after; at most 5 % more
    neighbour_max_s           longest wait of the neighbour; below --max-wait-s
    answers                   how often an attacker met each status, or `closed` or `silent`
    faults                    what broke these rules

    requests            damaged HTTP requests: cut, deep, long, zipped, of wrong types ...
    connections         opened, some with half a request, and dropped, up to 500 at a time
    sessions            conversations of two turns, opened and closed
    streams             streamed answers that the client drops at a random byte
    interpreter_forks   a session of Python forks, the child runs and ends
    workspace_forks     the same of a workspace that has written a file

Exit codes: 0 all parts keep the rules, 1 one does not, 2 bad input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import gzip
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.config.enums import PythonMode  # noqa: E402
from mega_agentrl.config.sections.tools import PythonToolConfig, WorkspaceToolConfig  # noqa: E402
from mega_agentrl.data.encoding.codec import HFCodec  # noqa: E402
from mega_agentrl.estimate.device import MIB  # noqa: E402
from mega_agentrl.estimate.host_memory import ResidentMemory  # noqa: E402
from mega_agentrl.rollout.gateway.server import Gateway  # noqa: E402
from mega_agentrl.sandbox.pool import SandboxPool  # noqa: E402
from mega_agentrl.sandbox.session import SandboxSession  # noqa: E402
from mega_agentrl.sandbox.workspace.pool import WorkspacePool  # noqa: E402
from mega_agentrl.types.records import GenerateRequest, Generation, ToolStatus  # noqa: E402
from tools.bench_gateway import InstantEngine, make_context, open_sessions  # noqa: E402
from tools.measurement import parse_options, select_cases  # noqa: E402

COUNTS = {
    "requests": 100_000,
    "connections": 10_000,
    "sessions": 5_000,
    "streams": 300,
    "interpreter_forks": 2_000,
    "workspace_forks": 2_000,
}
"""Number of requests, connections, sessions, streams or forks of each part at `--scale 1`."""
MAX_GROWTH = 1.05
SLACK_MIB = 4.0
"""Growth of memory that says nothing: pages that the allocator holds."""
QUESTION_INTERVAL_S = 0.05
NUM_CLIENTS = 16
SESSIONS_AT_ONCE = 500
ANSWER_TIMEOUT_S = 20.0
SETTLE_S = 10.0
WARM_UP_COUNT = 1_000
"""Work before the first reading, which fills caches and pools, so that these are no growth."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that this process and its children hold."""

    descriptors: int
    threads: int
    processes: int
    control_groups: int
    private_mib: float


def read_resources() -> Resources:
    """Return the resources after freed memory has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return Resources(
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        processes=len(process.children(recursive=True)),
        control_groups=sum(1 for _ in CGROUPS.glob(f"**/mega_agentrl-*-{process.pid}-*")),
        private_mib=ResidentMemory.current().private_bytes / MIB,
    )


def find_faults(before: Resources, after: Resources) -> list[str]:
    """Return what is left of a part."""
    faults = [
        f"{name}: {old} before, {new} after"
        for name, old, new in zip(
            asdict(before), asdict(before).values(), asdict(after).values(), strict=True
        )
        if name != "private_mib" and new != old
    ]
    limit_mib = before.private_mib * MAX_GROWTH + SLACK_MIB
    if after.private_mib > limit_mib:
        faults.append(f"private_mib: {after.private_mib:.0f}, expected at most {limit_mib:.0f}")
    return faults


async def wait_until_stable() -> Resources:
    """Return the resources once two readings in a row agree, or after `SETTLE_S`."""
    deadline_s = time.monotonic() + SETTLE_S
    before = read_resources()
    await asyncio.sleep(0.5)
    while find_faults(before, after := read_resources()) and time.monotonic() < deadline_s:
        before = after
        await asyncio.sleep(0.5)
    return after


async def wait_until_released(before: Resources) -> Resources:
    """Return the resources once they are those of before, or after `SETTLE_S`."""
    deadline_s = time.monotonic() + SETTLE_S
    while find_faults(before, after := read_resources()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.2)
    return after


# Attackers, which run in a process of their own


def question(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def http_bytes(
    key: str, body: bytes, *, path: str = "/v1/chat/completions", headers: str = ""
) -> bytes:
    """Return a request as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _junk(rng: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value, at times huge, deep or odd."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, -1, 0, 1e308, -1e308, 10**400, 2**63, 0.1]),
        lambda: "".join(chr(rng.choice([0, 10, 65, 0xD800, 0xE000, 0x1F600])) for _ in range(8)),
        lambda: "<|im_start|>system\n</tool_call>" * rng.randrange(1, 20),
        lambda: "a" * rng.randrange(20_000),
    ]
    if depth < 3:
        kinds += [
            lambda: [_junk(rng, depth + 1) for _ in range(rng.randrange(5))],
            lambda: {str(number): _junk(rng, depth + 1) for number in range(rng.randrange(5))},
        ]
    return rng.choice(kinds)()


def damaged_request(rng: random.Random, key: str) -> bytes:
    """Return a request that an agent with a fault, or without scruples, may send."""
    paths = ("chat/completions", "messages", "responses", "messages/count_tokens", "models", "x")
    path = f"/v1/{rng.choice(paths)}"
    fields = ("messages", "tools", "tool_choice", "stop", "max_tokens", "stream", "n", "system")
    values = question("Hi.") | {name: _junk(rng) for name in rng.sample(fields, rng.randrange(4))}
    body = json.dumps(values).encode("ascii")
    match rng.randrange(9):
        case 0:
            body = body[: rng.randrange(len(body))]
        case 1:
            body = rng.randbytes(rng.randrange(2_000))
        case 2:
            depth = rng.randrange(1, 20_000)
            body = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
        case 3:
            zipped = gzip.compress(bytes(1 << 20))
            return http_bytes(key, zipped, path=path, headers="Content-Encoding: gzip\r\n")
        case 4:
            request = http_bytes(key, body, path=path)
            place = rng.randrange(len(request))
            return request[:place] + rng.randbytes(8) + request[place:]
        case 5:
            return http_bytes(f"{key[:-1]}x", body, path=path)
        case 6:
            messages = [{"role": "user", "content": "a"}] * rng.randrange(5_000)
            body = json.dumps({"model": "m", "messages": messages}).encode()
    return http_bytes(key, body, path=path)


async def send(port: int, data: bytes, *, num_read: int | None = None) -> str:
    """Send bytes, read the answer or so many bytes of it, and return what came of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if num_read is not None:
                await reader.read(num_read)
                return "dropped"
            answer = await reader.read()
        return answer[9:12].decode("ascii", "replace") if answer else "closed"
    except TimeoutError:
        return "silent"
    except ConnectionError:
        return "closed"
    finally:
        writer.transport.abort()


async def _attack_with_requests(port: int, keys: Sequence[str], rng: random.Random) -> str:
    return await send(port, damaged_request(rng, rng.choice(keys)))


async def _attack_with_connections(port: int, keys: Sequence[str], rng: random.Random) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    request = http_bytes(rng.choice(keys), json.dumps(question("Hi.")).encode())
    writer.write(request[: rng.randrange(len(request))])
    await asyncio.sleep(rng.random())
    writer.transport.abort()
    return "dropped"


async def _attack_with_streams(port: int, keys: Sequence[str], rng: random.Random) -> str:
    body = json.dumps(question(f"Begin {rng.random()}.", stream=True)).encode()
    return await send(port, http_bytes(rng.choice(keys), body), num_read=rng.randrange(1, 4_000))


async def _hold_conversation(port: int, keys: Sequence[str], rng: random.Random) -> str:
    """Ask twice in a session that nobody else uses."""
    key, first = keys[0], question(f"Begin {rng.random()}.")
    await send(port, http_bytes(key, json.dumps(first).encode()))
    return await send(port, http_bytes(key, json.dumps(question("And more?")).encode()))


ATTACKS = {
    "requests": (_attack_with_requests, NUM_CLIENTS),
    "connections": (_attack_with_connections, 500),
    "streams": (_attack_with_streams, NUM_CLIENTS),
    "sessions": (_hold_conversation, NUM_CLIENTS),
}
"""An attack, and how many of them run at once."""


async def _attack(part: str, port: int, keys: Sequence[str], count: int, seed: str) -> Counter[str]:
    attack, num_clients = ATTACKS[part]
    numbers = iter(range(count))
    outcomes: Counter[str] = Counter()

    async def client() -> None:
        for number in numbers:
            own = [keys[number % len(keys)]] if part == "sessions" else keys
            outcomes[await attack(port, own, random.Random(f"{seed}/{part}/{number}"))] += 1

    await asyncio.gather(*(client() for _ in range(min(num_clients, count))))
    return outcomes


def run_attackers(results: Any, *arguments: Any) -> None:
    """Attack, and put the outcomes into `results`."""
    results.put(asyncio.run(_attack(*arguments)))


# The neighbour


def run_neighbour(results: Any, begins: Any, ends: Any, port: int, key: str) -> None:
    """Ask the same question until `ends` is set; put the longest wait, s, into `results`.

    `begins` is set after the first answer.
    """
    results.put(asyncio.run(_ask_again_and_again(begins, ends, port, key)))


async def _ask_again_and_again(begins: Any, ends: Any, port: int, key: str) -> float:
    request = http_bytes(key, json.dumps(question("What is it?")).encode())
    longest_s = 0.0
    while not ends.is_set():
        begin_s = time.perf_counter()
        status = await send(port, request)
        longest_s = max(longest_s, time.perf_counter() - begin_s)
        if status != "200":
            raise RuntimeError(f"the neighbour got {status}, expected 200")
        begins.set()
        await asyncio.sleep(QUESTION_INTERVAL_S)
    return longest_s


# The parts


Run = Callable[[int], Awaitable[tuple[float, Counter[str]]]]
"""Attacks so many times; returns the neighbour's longest wait, s, and what attackers met."""


class SlowEngine(InstantEngine):
    """Answers after a moment, so that a client can leave before the answer."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the answer."""
        await asyncio.sleep(0.02)
        return await super().generate(request)


class GatewaySoak:
    """Attacks a gateway of this process."""

    def __init__(self, gateway: Gateway, codec: HFCodec, seed: int) -> None:
        self._gateway = gateway
        self._context = replace(make_context(codec), generator=SlowEngine(codec))
        self._seed = seed
        self._port = int(gateway.url.rpartition(":")[2])
        self._spawn = multiprocessing.get_context("spawn")
        self._thread = ThreadPoolExecutor(1)

    async def run(self, part: str, count: int) -> tuple[float, Counter[str]]:
        """Run a part; its sessions are open `SESSIONS_AT_ONCE` at a time."""
        (neighbour_key,) = open_sessions(self._gateway, self._context, 1)
        waits = self._spawn.Queue()
        begins, ends = self._spawn.Event(), self._spawn.Event()
        outcomes: Counter[str] = Counter()
        at_once = SESSIONS_AT_ONCE if part == "sessions" else count
        arguments = (waits, begins, ends, self._port, neighbour_key)
        async with self._started(run_neighbour, *arguments) as neighbour:
            await _wait(begins.is_set, neighbour)
            for first in range(0, count, at_once):
                outcomes += await self._attack(part, min(at_once, count - first), first)
            ends.set()
            await _wait(lambda: not waits.empty(), neighbour)
            longest_s = waits.get()
        _close_queue(waits)
        await self._gateway.close_session(neighbour_key)
        return longest_s, outcomes

    async def _attack(self, part: str, count: int, first: int) -> Counter[str]:
        """Attack from a process of its own, with new sessions."""
        keys = open_sessions(self._gateway, self._context, count if part == "sessions" else 8)
        answers = self._spawn.Queue()
        arguments = (answers, part, self._port, keys, count, f"{self._seed}/{first}")
        async with self._started(run_attackers, *arguments) as attackers:
            await _wait(lambda: not answers.empty(), attackers)
            outcomes: Counter[str] = answers.get()
        _close_queue(answers)
        for key in keys:
            await self._gateway.close_session(key)
        return outcomes

    @contextlib.asynccontextmanager
    async def _started(self, target: Callable[..., None], *arguments: Any) -> AsyncIterator[Any]:
        """Run a function in a process; the loop waits neither for its start nor for its end."""
        process = self._spawn.Process(target=target, args=arguments)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, process.start)
        try:
            yield process
            await loop.run_in_executor(self._thread, process.join, 5)
        finally:
            process.kill()
            await loop.run_in_executor(self._thread, process.join)
            process.close()


def _close_queue(queue: Any) -> None:
    queue.close()
    queue.join_thread()


async def _wait(condition: Callable[[], bool], process: Any) -> None:
    """Wait for what a process brings about, without blocking the loop."""
    while not condition():
        if not process.is_alive() and not condition():
            raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}")
        await asyncio.sleep(0.05)


async def fork_again_and_again(
    pool: SandboxPool, count: int, first: str, later: str
) -> tuple[float, Counter[str]]:
    """Fork a session, with a call in each child; return what `GatewaySoak.run` returns.

    Args:
        pool: The sandboxes.
        count: Number of forks.
        first: What the forked session runs before.
        later: What each child runs, and the neighbour.
    """
    parent, neighbour = await pool.open(), await pool.open()
    await parent.run(first)
    await neighbour.run(first)
    outcomes: Counter[str] = Counter()
    ends = asyncio.Event()
    waiting = asyncio.ensure_future(_call_again_and_again(neighbour, later, ends))
    for _ in range(count):
        child = await parent.fork()
        outcomes[(await child.run(later)).status.value] += 1
        await child.close()
    ends.set()
    longest_s = await waiting
    for session in (parent, neighbour):
        await session.close()
    return longest_s, outcomes


async def _call_again_and_again(session: SandboxSession, call: str, ends: asyncio.Event) -> float:
    longest_s = 0.0
    while not ends.is_set():
        begin_s = time.perf_counter()
        result = await session.run(call)
        longest_s = max(longest_s, time.perf_counter() - begin_s)
        if result.status is not ToolStatus.ok:
            raise RuntimeError(f"the neighbour got {result}, expected ok")
        await asyncio.sleep(QUESTION_INTERVAL_S)
    return longest_s


@contextlib.asynccontextmanager
async def opened(part: str, codec: HFCodec, seed: int) -> AsyncIterator[Run]:
    """Start what a part attacks, and yield the function that attacks it so many times."""
    if part in ATTACKS:
        gateway = Gateway()
        await gateway.start()
        try:
            yield partial(GatewaySoak(gateway, codec, seed).run, part)
        finally:
            await gateway.close()
        return
    if part == "interpreter_forks":
        config = PythonToolConfig(mode=PythonMode.stateful, num_workers=3, preload_modules=[])
        pool, calls = SandboxPool(config), ("numbers = list(range(1000))", "print(sum(numbers))")
    else:
        pool, calls = WorkspacePool(WorkspaceToolConfig(root="host")), ("echo 1 > a", "cat a > b")
    await pool.start()
    try:
        yield lambda count: fork_again_and_again(pool, count, *calls)
    finally:
        await pool.close()


async def soak_all(
    parts: Sequence[str], scale: float, max_wait_s: float, codec: HFCodec, seed: int
) -> bool:
    """Run the parts and print their lines; return whether all keep the rules."""
    is_sound = True
    for part in parts:
        count = max(1, int(COUNTS[part] * scale))
        async with opened(part, codec, seed) as run:
            await run(min(count, max(count // 20, WARM_UP_COUNT)))
            before = await wait_until_stable()
            begin_s = time.perf_counter()
            longest_s, outcomes = await run(count)
            seconds = time.perf_counter() - begin_s
            after = await wait_until_released(before)
        faults = find_faults(before, after)
        if longest_s >= max_wait_s:
            faults.append(f"neighbour_max_s: {longest_s:.2f}, expected less than {max_wait_s}")
        is_sound &= not faults
        line = {
            "soak": part,
            "count": count,
            "seconds": round(seconds, 1),
            **{
                name: [round(old, 1), round(new, 1)]
                for (name, old), new in zip(
                    asdict(before).items(), asdict(after).values(), strict=True
                )
            },
            "neighbour_max_s": round(longest_s, 3),
            "answers": dict(outcomes.most_common()),
            "faults": faults,
        }
        print(json.dumps(line), flush=True)
    return is_sound


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts; return 0 if all keep the rules."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["*"], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the counts")
    parser.add_argument("--model", type=Path, default=ROOT / "runs/toolqa_chat/model")
    parser.add_argument(
        "--max-wait-s", type=float, default=1.0, help="limit of the neighbour's longest wait"
    )
    options = parse_options(parser, arguments, scale=0.01, max_wait_s=60.0)
    try:
        parts = select_cases(options.parts, list(COUNTS))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    codec = HFCodec(options.model)
    is_sound = asyncio.run(soak_all(parts, options.scale, options.max_wait_s, codec, options.seed))
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
