"""The rollout benchmark: what it waits for and what it counts."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega_agentrl.types.records import GenerateRequest
from tests.fakes import FakeGenerator, FakeTools
from tools import bench_rollout
from tools.bench_rollout import CountingGenerator, DelayedTools, RolloutCounts, latency_s

SCRIPT = Path(bench_rollout.__file__)


def test_latencies_have_the_median_and_the_tail_they_say():
    drawn = sorted(latency_s(f"python {{'code': '{n}'}}") for n in range(4000))
    assert statistics.median(drawn) == pytest.approx(0.2, rel=0.1)
    assert drawn[int(0.99 * 4000)] == pytest.approx(5.0, rel=0.3)
    assert latency_s("a") == latency_s("a") != latency_s("b")


async def test_answers_are_delayed_and_sessions_counted(monkeypatch):
    monkeypatch.setattr(bench_rollout, "latency_s", lambda text: 0.1)
    counts = RolloutCounts()
    tools = DelayedTools(FakeTools(), counts)
    session = tools.open_session()
    await session.create({})
    child = await session.fork()
    assert counts.num_sessions == 2
    full = asyncio.create_task(tools.wait_for_room(1, 2))
    begin = time.perf_counter()
    await child.execute("python", {"text": "1"})
    assert time.perf_counter() - begin >= 0.1
    assert len(counts.latencies_s) == 1
    assert not full.done()
    await child.release()
    await child.release()
    await asyncio.wait_for(full, 60)
    assert counts.num_sessions == 1


async def test_idle_time_is_that_without_any_request():
    counts = RolloutCounts()
    engine = CountingGenerator(FakeGenerator(lambda response, request: "abc\0"), counts)
    await asyncio.sleep(0.05)
    request = GenerateRequest(request_id="r", token_ids=(81, 63), max_tokens=8)
    await asyncio.gather(engine.generate(request), engine.generate(request))
    assert counts.idle_s >= 0.05
    assert counts.num_running == 0
    assert counts.num_sampled == 8
    assert counts.num_prefilled == 2 * len(request.token_ids)


def test_a_model_that_is_not_there_is_named(tmp_path, capsys):
    assert bench_rollout.main(["--model", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_complete_every_group(assets):
    command = [sys.executable, str(SCRIPT), "--model", f"{assets}/model", "--data", str(assets)]
    command += ["--prompts", "4", "--flight", "8", "--repeats", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(text) for text in ended.stdout.splitlines()]
    assert all(set(line) == set(lines[0]) for line in lines)
    found = {line["case"]: line for line in lines}
    assert found["stream/leaked"]["ours"] == found["stream/leaked"]["baseline"] == 0
    assert found["stream/sampled"]["ours"] > 0
