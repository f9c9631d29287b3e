"""Benchmarks the gateway's own time per request, with an engine that answers at once.

    python tools/bench_gateway.py [--quick] [--sessions 1000] [--seconds 20] [--cases PATTERN ...]

Clients in a process of their own hold conversations over HTTP: each request sends the whole
history, as the OpenAI SDK does, and the answer is 60 tokens. A line has the keys bench, case, unit,
ours, baseline and ratio = baseline / ours:

    ours       `rollout.gateway`: looks the history up, encodes the new messages only, captures
    baseline   a bare server on the same HTTP library, which renders the whole history with the chat
               template and tokenizes it, as an inference server without sessions must

    short/p50, short/p99    ms from request to answer, conversations of 4 turns one after the other
    long/p50, long/p99      of 40 turns, each with a new message of 500 words
    held/p50, held/p99      `--sessions` conversations of 40 turns open at once, each asking at a
                            random time, about 50 requests a second
    held/memory             KiB of memory for each of these sessions
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.config.enums import CallProtocol  # noqa: E402
from mega_agentrl.config.sections.rollout import RolloutConfig  # noqa: E402
from mega_agentrl.data.encoding.codec import HFCodec  # noqa: E402
from mega_agentrl.rollout.context import RolloutContext, make_rollout_context  # noqa: E402
from mega_agentrl.rollout.gateway.server import Gateway  # noqa: E402
from mega_agentrl.rollout.gateway.session import SessionScope  # noqa: E402
from mega_agentrl.rollout.gateway.tools import SessionTools  # noqa: E402
from mega_agentrl.rollout.tracing import TrajectorySpans  # noqa: E402
from mega_agentrl.tool.toolkit import ToolKit  # noqa: E402
from mega_agentrl.types.records import FinishReason, GenerateRequest, Generation, Prompt  # noqa: E402
from tools.measurement import PeakMemory, bench_line, parse_options, select_cases  # noqa: E402

CASES = (
    *("short/p50", "short/p99", "long/p50", "long/p99"),
    *("held/p50", "held/p99", "held/memory"),
)
NUM_ANSWER_TOKENS = 60
HELD_RATE = 50.0
"""Requests a second over all held sessions."""
WORDS = ("river", "seven", "of", "the", "amber", "stone", "runs", "below")


@dataclass(frozen=True)
class Load:
    """The conversations of a case."""

    num_sessions: int
    num_turns: int
    num_words: int
    """Words of each tool answer."""
    pause_s: float = 0.0
    """Mean time between the requests of a session, exponentially distributed; 0 runs the sessions
    one after the other."""


class InstantEngine:
    """Answers every request at once with the same tokens."""

    version = 1
    can_serve = True

    def __init__(self, codec: HFCodec) -> None:
        ids = codec.encode("the amber stone runs below the river " * NUM_ANSWER_TOKENS)
        self.token_ids = (*ids[: NUM_ANSWER_TOKENS - 1], codec.eos_id)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the answer."""
        zeros = (0.0,) * len(self.token_ids)
        return Generation(
            request_id=request.request_id,
            token_ids=self.token_ids,
            logps=zeros,
            entropies=zeros,
            argmax_ids=self.token_ids,
            finish_reason=FinishReason.eos,
            stop_string=None,
            version=1,
        )

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""


def make_context(codec: HFCodec) -> RolloutContext:
    """Return a context without limits that the benchmark would reach."""
    config = RolloutConfig(
        call_protocol=CallProtocol.hermes, max_turns=10_000, max_response_tokens=1_000_000
    )
    return make_rollout_context(
        generator=InstantEngine(codec),
        tools=ToolKit([], protocol=CallProtocol.hermes),
        codec=codec,
        config=config,
        max_model_len=1_000_000,
        seed=0,
        step="bench",
    )


def open_sessions(gateway: Gateway, context: RolloutContext, count: int) -> list[str]:
    """Open sessions and return their keys."""
    prompt = Prompt(
        prompt_id="p", data_source="bench", messages=(), ground_truth="", token_ids=(0,)
    )
    keys = []
    for index in range(count):
        spans = TrajectorySpans(None, prompt, f"p/bench/{index}", "bench", None)
        scope = SessionScope(
            context=context,
            prompt=prompt,
            prompt_key="p",
            path=(index,),
            spans=spans,
            tools=SessionTools(context, prompt, spans),
        )
        keys.append(gateway.open_session(scope)[0])
    return keys


async def start_bare_server(codec: HFCodec, engine: InstantEngine) -> tuple[web.AppRunner, str]:
    """Start a server that renders and tokenizes each request as a whole."""

    async def answer(http: web.Request) -> web.Response:
        body = json.loads(await http.read())
        codec.apply_chat_template(body["messages"])
        message = {"role": "assistant", "content": codec.decode(engine.token_ids)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def run_clients(url: str, keys: Sequence[str], load: Load, seconds: float, results: Any) -> None:
    """Hold conversations for some time, and put the times of all requests, ms, into `results`."""
    results.put(asyncio.run(_converse(url, keys, load, seconds)))


async def _converse(url: str, keys: Sequence[str], load: Load, seconds: float) -> list[float]:
    times_ms: list[float] = []
    end_s = time.perf_counter() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        conversations = [_hold(http, url, key, load, end_s, times_ms) for key in keys]
        if load.pause_s:
            await asyncio.gather(*conversations)
        else:
            for conversation in conversations:
                await conversation
    return times_ms


async def _hold(
    http: aiohttp.ClientSession,
    url: str,
    key: str,
    load: Load,
    end_s: float,
    times_ms: list[float],
) -> None:
    rng = random.Random(key)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    messages = [{"role": "user", "content": f"Begin {rng.random()}."}]
    for _ in range(load.num_turns):
        pause_s = rng.expovariate(1 / load.pause_s) if load.pause_s else 0.0
        if time.perf_counter() + pause_s > end_s:
            return
        await asyncio.sleep(pause_s)
        body = json.dumps({"model": "m", "messages": messages}).encode()
        start_s = time.perf_counter()
        async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            answer = await response.json()
        times_ms.append(1000 * (time.perf_counter() - start_s))
        text = " ".join(rng.choices(WORDS, k=load.num_words))
        messages += [answer["choices"][0]["message"], {"role": "user", "content": text}]


async def measure(url: str, keys: Sequence[str], load: Load, seconds: float) -> list[float]:
    """Return the times of the requests of clients in another process, ms, sorted."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    client = spawn.Process(target=run_clients, args=(url, keys, load, seconds, results))
    client.start()
    try:
        while results.empty() and client.is_alive():
            await asyncio.sleep(0.05)
        return sorted(results.get(timeout=5))
    finally:
        client.join(10)
        if client.is_alive():
            client.kill()


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


async def run(cases: Sequence[str], codec: HFCodec, num_sessions: int, seconds: float) -> None:
    """Measure the cases and print their lines."""
    context = make_context(codec)
    gateway = Gateway()
    await gateway.start()
    engine = InstantEngine(codec)
    runner, bare_url = await start_bare_server(codec, engine)
    loads = {
        # First, as it measures memory, which the others would leave behind.
        "held": Load(num_sessions, 40, 50, pause_s=num_sessions / HELD_RATE),
        "short": Load(5_000, 4, 20),
        "long": Load(100, 40, 500),
    }
    try:
        for name, load in loads.items():
            chosen = [case for case in cases if case.startswith(f"{name}/")]
            if not chosen:
                continue
            memory = PeakMemory()
            keys = open_sessions(gateway, context, load.num_sessions)
            ours = await measure(gateway.url, keys, load, seconds)
            kib = 1024 * memory.peak_mib() / load.num_sessions
            theirs = await measure(bare_url, keys, load, seconds)
            for case in chosen:
                _print_case(case, ours, theirs, kib)
            for key in keys:
                await gateway.close_session(key)
    finally:
        await gateway.close()
        await runner.cleanup()


def _print_case(case: str, ours: list[float], theirs: list[float], kib: float) -> None:
    if case.endswith("memory"):
        line = bench_line("gateway", case, "KiB", kib, None)
    else:
        share = 0.5 if case.endswith("p50") else 0.99
        times = percentile(ours, share), percentile(theirs, share)
        line = bench_line("gateway", case, "ms", *times)
    print(json.dumps(line), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--model", type=Path, default=ROOT / "runs/toolqa_chat/model")
    parser.add_argument("--cases", nargs="+", default=["*"])
    options = parse_options(parser, arguments, sessions=20, seconds=1.0)
    cases = select_cases(options.cases, CASES)
    asyncio.run(run(cases, HFCodec(options.model), options.sessions, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
