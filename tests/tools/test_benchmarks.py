"""The benchmarks: every case prints its line, and what they simulate and count is right."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mega_agentrl.batch.tree_order import row_lengths
from mega_agentrl.types.records import GenerateRequest
from tests.fakes import FakeGenerator, FakeTools
from tools import (
    bench_async,
    bench_batch,
    bench_driver,
    bench_logprob,
    bench_memory,
    bench_neighbours,
    bench_replay,
    bench_reshard,
    bench_rollout,
    bench_sandbox,
    bench_tree,
    bench_workspace,
    delayed_tools,
)
from tools.measurement import PeakMemory, bench_line, select_cases

TOOLS = Path(bench_driver.__file__).parent
TINY_MODEL = [
    *("--hidden-size", "256", "--intermediate-size", "512", "--num-hidden-layers", "4"),
    *("--num-attention-heads", "4", "--num-key-value-heads", "2", "--vocab-size", "2048"),
]


def run_benchmark(name, *arguments):
    """Run a script, which also compares the outputs of both sides; return its lines by case."""
    command = [sys.executable, "-W", "ignore", str(TOOLS / f"bench_{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert {line["bench"] for line in lines} == {name}
    return {line["case"]: line for line in lines}


@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("name", "arguments", "unit_by_case"),
    [
        (
            "logprob",
            ["--vocab", "256", "--repeats", "1"],
            {"memory/T2048/TP1": "MiB", "forward_backward/T2048/TP2": "s"},
        ),
        (
            "replay",
            ["--requests", "4", "--tokens", "8", "--repeats", "1"],
            {"rollout/bytes": "bytes", "batch/bytes": "bytes", "update/seconds": "s"},
        ),
        (
            "sandbox",
            ["--calls", "12"],
            {
                "p50/plain": "s",
                "p99/numpy": "s",
                "stateful/p50": "s",
                "fork/p99": "s",
                "memory/session": "MiB",
            },
        ),
    ],
    ids=["logprob", "replay", "sandbox"],
)
def test_chosen_cases_are_measured(name, arguments, unit_by_case):
    lines = run_benchmark(name, *arguments, "--cases", ",".join(unit_by_case))
    assert {case: line["unit"] for case, line in lines.items()} == unit_by_case
    assert all(line["ours"] and line["baseline"] for line in lines.values())


@pytest.mark.slow(60)
def test_resharding_sends_a_rank_only_its_half_of_the_model():
    sizes = (*TINY_MODEL, "--bucket-mib", "1", "--repeats", "1", "--cases", "*/gloo*")
    lines = run_benchmark("reshard", *sizes)
    assert {line["unit"] for line in lines.values()} == {"s", "MiB", "share"}
    # 4 layers of 787,200 elements, 2 tables of 2,048 x 256 and a norm, in float32: each of two
    # ranks gets its half by our path, norms and headers aside.
    whole = lines["received/gloo/verl"]["baseline"]
    assert whole == pytest.approx((4 * 787_200 + 2 * 2048 * 256 + 256) * 4 / 2**20, rel=1e-4)
    assert lines["received/gloo/verl"]["ours"] == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.slow(30)
def test_both_rollout_loops_complete_every_group(assets):
    folders = ("--model", f"{assets}/model", "--data", str(assets))
    lines = run_benchmark("rollout", *folders, "--prompts", "4", "--flight", "8", "--batches", "1")
    assert lines["stream/leaked"]["ours"] == lines["stream/leaked"]["baseline"] == 0
    assert lines["stream/sampled"]["ours"] > 0


def test_actor_and_transformers_take_the_same_first_step():
    sizes = ("--tokens", "64", "--row", "16", "--layers", "2", "--hidden", "64", "--heads", "4")
    sizes += ("--kv-heads", "2", "--intermediate", "96", "--vocab", "128", "--repeats", "1")
    lines = run_benchmark("actor", *sizes)
    steps, tokens, mfu, memory = lines.values()
    assert next(iter(lines)) == "step/L2/H64/T64"
    for side in ("ours", "baseline"):
        assert tokens[side] * steps[side] == pytest.approx(64, rel=1e-3)
    if not torch.cuda.is_available():
        assert mfu["ours"] is memory["ours"] is None


def test_a_rank_receives_the_share_of_its_data_rank(capsys):
    # The script also compares what the data ranks get with the batch.
    sizes = ("--rows", "32", "--tokens", "256", "--data", "4")
    assert bench_batch.main(sizes) == 0
    lines = {one["case"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert tuple(lines) == bench_batch.CASES
    sent, received = lines["sent/step"], lines["received/rank"]
    assert received["ours"] == pytest.approx(sent["ours"] / 4, rel=1e-3)
    # Four machines get the padded batch twice, and a rank unpickles it three times.
    assert received["baseline"] == pytest.approx(3 * sent["baseline"] / (2 * 4), rel=1e-3)


@pytest.mark.slow(60)
def test_trees_and_flat_rows_and_a_dense_mask_agree():
    # The script compares losses, gradient norms and log-probs of the three sides.
    sizes = ("--layers", "1", "--hidden", "64", "--intermediate", "64", "--vocab", "64")
    cases = ("--cases", "*/arpo/*", "--repeats", "1", "--cpu-time")
    lines = run_benchmark("tree", *sizes, *cases)
    assert {line["unit"] for line in lines.values()} == {"s", "MiB"}
    flat, dense = lines["update/arpo/flat"], lines["update/arpo/dense"]
    assert flat["ours"] == dense["ours"]
    assert flat["tokens_ratio"] > 1.5 and dense["tokens_ratio"] == 1


def test_the_tokens_of_the_trees_by_hand():
    # The last token of a row is not an input.
    for name, flat, unique in (
        ("group", 16 * 2559, 2048 + 16 * 511),
        # The chain, then siblings that share 1 to 29 turns of 128; their last tokens are theirs.
        ("chain20", 4287 + 19 * (512 + 192 - 1) + 128 * 277, 4287 + 19 * 191),
    ):
        batch = bench_tree.make_batch(bench_tree.BATCHES[name](), vocab=64)
        rows = row_lengths(batch)
        assert rows.input_length_R.sum() == flat
        assert (rows.input_length_R - rows.shared_input_length_R).sum() == unique


def test_driver_seconds_add_up():
    # In a process of its own: the peak of its memory counts.
    lines = run_benchmark("driver", "--rows", "32", "--tokens", "256", "--share", "1")
    assert tuple(lines) == bench_driver.CASES
    *parts, together, _ = lines.values()
    assert together["ours"] == pytest.approx(sum(line["ours"] for line in parts), abs=0.003)


@pytest.mark.parametrize(
    ("main", "known_case"),
    [
        (bench_batch.main, "received/rank"),
        (bench_driver.main, "seconds/ares"),
        (bench_logprob.main, "forward_backward/T4096/TP2/H4096"),
        (bench_reshard.main, "memory/rollout/gloo/verl"),
        (bench_replay.main, "batch/bytes"),
        (bench_sandbox.main, "stateful/p99"),
        (bench_neighbours.main, "stateful/fork bomb/fork-max"),
        (bench_tree.main, "memory/chain20/dense"),
        (bench_workspace.main, "fork/10MB/p50"),
    ],
    ids=[
        "batch",
        "driver",
        "logprob",
        "reshard",
        "replay",
        "sandbox",
        "neighbours",
        "tree",
        "workspace",
    ],
)
def test_a_pattern_without_a_match_lists_the_cases(main, known_case, capsys):
    assert main(["--cases", "transfer/pigeon/verl"]) == 2
    printed = capsys.readouterr()
    assert known_case in printed.err and printed.out == ""


@pytest.mark.parametrize("main", [bench_async.main, bench_rollout.main], ids=["async", "rollout"])
def test_a_missing_model_is_refused(main, tmp_path, capsys):
    assert main(["--model", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


# ---- bench_rollout and bench_async ---------------------------------------------------------


async def test_latencies_include_the_delay_and_sessions_are_counted(monkeypatch):
    monkeypatch.setattr(delayed_tools, "latency_s", lambda text: 0.1)
    counts = bench_rollout.RolloutCounts()
    tools = bench_rollout.CountingTools(delayed_tools.DelayedTools(FakeTools()), counts)
    session = tools.open_session()
    await session.create({})
    child = await session.fork()
    assert counts.num_sessions == 2
    full = asyncio.create_task(tools.wait_for_room(1, 2))
    await child.execute("python", {"text": "1"})
    assert counts.latencies_s[0] >= 0.1
    assert not full.done()
    await child.release()
    await child.release()
    await asyncio.wait_for(full, 60)
    assert counts.num_sessions == 1


async def test_an_engine_is_idle_while_no_request_runs():
    counts = bench_rollout.RolloutCounts()
    fake = FakeGenerator(lambda response, request: "abc\0")
    engine = bench_rollout.CountingGenerator(fake, counts)
    await asyncio.sleep(0.05)
    request = GenerateRequest(request_id="r", token_ids=(81, 63), max_tokens=8)
    await asyncio.gather(engine.generate(request), engine.generate(request))
    assert counts.idle_s >= 0.05
    assert counts.num_running == 0
    assert counts.num_sampled == 8
    assert counts.num_prefilled == 2 * len(request.token_ids)


def steps(rollout_s, update_s, stale):
    return [
        {
            "stage": "rl",
            "step": step,
            "time/rollout_s": rollout_s,
            "time/update_s": update_s,
            "time/weight_sync_s": 0.5 * step,
            "mismatch/logp_mean_abs": 0.01,
            "mismatch/logp_max_abs": 0.1 * step,
            "mismatch/ess": 0.5,
            "rollout_correction/capped_fraction": 0.01 * step,
            "rollout/staleness_mean": stale,
            "rollout/staleness_max": stale,
        }
        for step in (1, 2, 3, 4)
    ]


def test_async_lines_by_hand():
    lines = {
        line["case"]: (line["ours"], line["baseline"])
        for line in bench_async.compare(steps(1.0, 3.0, 1), steps(3.0, 3.0, 0))
    }
    assert lines["step/wall"] == (5.25, 7.25)
    assert lines["step/waiting"] == (1.0, 3.0)
    assert lines["step/learning"] == (4.25, 4.25)
    assert lines["step/weight_sync"] == (1.25, 1.25)
    assert lines["mismatch/max"][0] == 0.4
    assert lines["rollout_correction/capped_fraction"][0] == pytest.approx(0.025)
    assert lines["staleness/max"] == (1, 0)


def test_first_and_last_step_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*steps(1, 1, 0), {"stage": "x"}]))
    assert [one["step"] for one in bench_async.read_steps(path)] == [2, 3]
    path.write_text(json.dumps(steps(1, 1, 0)[0]) + "\n")
    with pytest.raises(ValueError, match="--steps=1"):
        bench_async.read_steps(path)


# ---- bench_sandbox, bench_memory and what all share ----------------------------------------


def test_a_mix_has_different_programs_a_third_plain_and_a_third_numpy():
    codes = bench_sandbox.snippets("mix", 12)
    for word, share in (("np.", 4), ("sympy", 2), ("pandas", 2), ("total", 4)):
        assert sum(word in code for code in codes) == share
    assert len(set(codes)) == 12


def test_percentiles_are_measured_values():
    assert bench_sandbox.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert bench_sandbox.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert bench_sandbox.percentile([float(n) for n in range(1, 201)], 0.99) == 198.0
    assert bench_sandbox.percentile([5.0], 0.99) == 5.0


def test_answers_that_differ_end_the_sandbox_benchmark():
    bench_sandbox.check_equal(["1", "2", "3"], ["1", "2"])
    with pytest.raises(RuntimeError, match="call 1"):
        bench_sandbox.check_equal(["1", "5"], ["1", "2"])


MEMORY_METRICS = {
    "stage": "rl",
    "step": 1,
    "memory/policy_peak_mib": 100.0,
    "memory/policy_libraries_mib": 300.0,
    "memory/engine_peak_mib": 1200.0,
    "memory/engine_libraries_mib": 400.0,
}


def test_predicted_memory_grows_with_the_tokens_of_a_run(assets, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(f"model:\n  path: {assets}/model\n")
    predicted = []
    for tokens in (1024.0, 4096.0):
        line = MEMORY_METRICS | {"memory/max_micro_batch_tokens": tokens}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        assert bench_memory.main([str(tmp_path)]) == 0
        lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        assert [(line["case"], line["baseline"]) for line in lines] == [
            ("policy/peak", 100.0),
            ("policy/libraries", 300.0),
            ("engine/peak", 1200.0),
            ("engine/libraries", 400.0),
        ]
        assert [line["ours"] is None for line in lines] == [False, True] * 2
        predicted.append(lines[0]["ours"])
    assert predicted[1] > predicted[0] + 20


def test_a_run_without_memory_metrics_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 1}\n')
    assert bench_memory.main([str(tmp_path)]) == 2
    assert "libraries_mib" in capsys.readouterr().err


def test_cases_are_chosen_by_patterns_in_their_own_order():
    names = ["time/a", "time/b", "memory/a"]
    assert select_cases(["memory/*,time/b"], names) == ["time/b", "memory/a"]
    assert select_cases(["memory/*", "*"], names) == names
    assert select_cases(["time/?"], names) == ["time/a", "time/b"]
    with pytest.raises(ValueError, match=r"--cases time memory: no such case among\n  time/a\n"):
        select_cases(["time,memory"], names)


def test_a_line_has_a_ratio_only_where_ours_is_a_divisor():
    line = bench_line("b", "a/case", "s", 0.25, 1.0)
    assert list(line) == ["bench", "case", "unit", "ours", "baseline", "ratio"]
    assert (line["ours"], line["baseline"], line["ratio"]) == (0.25, 1.0, 4.0)
    for ours, baseline in ((None, 1.0), (1.0, None), (None, None), (0.0, 1.0)):
        line = bench_line("b", "c", "s", ours, baseline)
        assert (line["ours"], line["baseline"], line["ratio"]) == (ours, baseline, None)
    assert bench_line("b", "c", "s", 2.0, 0.0)["ratio"] == 0.0


def test_peak_memory_counts_from_the_construction_on():
    block = bytearray(b"x") * (64 << 20)
    del block
    memory = PeakMemory()
    assert memory.peak_mib() < 16
    block = bytearray(b"x") * (64 << 20)
    del block
    assert 60 < memory.peak_mib() < 90
    assert memory.private_peak_mib() == pytest.approx(memory.peak_mib(), abs=1)
