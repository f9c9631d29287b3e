"""What the benchmarks simulate and count; `test_quick_forms` runs them whole."""

import asyncio
import dataclasses
import json

import pytest

from mega_agentrl.batch.tree_order import row_lengths
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import GenerateRequest
from tests.estimate.configs import configured
from tests.estimate.shapes import released
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
    bench_step_time,
    bench_tree,
    bench_workspace,
    delayed_tools,
)
from tools.measurement import PeakMemory, bench_line, select_cases

pytestmark = pytest.mark.extended


def test_the_trees_have_the_tokens_worked_out_by_hand():
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


@pytest.mark.parametrize(
    "main",
    [bench_async.main, bench_rollout.main, bench_step_time.main],
    ids=["async", "rollout", "step_time"],
)
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
    await asyncio.wait_for(full, 300)
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


def test_async_lines_leave_out_what_no_step_has():
    ours, baseline = steps(1.0, 3.0, 1), steps(3.0, 3.0, 0)
    del ours[0]["mismatch/logp_mean_abs"]
    for step in baseline:
        del step["mismatch/ess"]
    lines = {line["case"]: line for line in bench_async.compare(ours, baseline)}
    assert lines["mismatch/mean"]["ours"] == pytest.approx(0.01)
    assert "mismatch/ess" not in lines


def test_async_lines_compare_times_and_waiting():
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
    with pytest.raises(InputError) as caught:
        bench_async.read_steps(path)
    assert (caught.value.name, caught.value.got) == ("--steps", 1)


# ---- bench_step_time -----------------------------------------------------------------------


STEP_METRICS = {
    "rollout/prompt_tokens_mean": 20.0,
    "rollout/response_tokens_mean": 60.0,
    "rollout/response_tokens_max": 96.0,
    "rollout/sampled_tokens_mean": 50.0,
    "rollout/tool_calls_mean": 1.5,
    "rollout/tool_latency_mean_s": 0.01,
    "tree/token_ratio": 1.5,
}


def run_that_takes(speeds, run, trajectories):
    """A run whose phases are those that the speeds predict."""
    config = configured(prompt=32, response=96, tensor=2 if "two" in run.name else 1)
    shape = released("qwen3-4b", num_hidden_layers=2, hidden_size=128, intermediate_size=256)
    metrics = STEP_METRICS | {"rollout/num_trajectories": float(trajectories)}
    one = bench_step_time.MeasuredRun(run, config, shape, metrics)
    phases = bench_step_time.predicted_phases(one.predict(speeds), staleness=run.staleness)
    metrics |= {f"time/{name}_s": value for name, value in phases.items() if name != "driver"}
    metrics["time/advantage_s"] = phases["driver"]
    return dataclasses.replace(one, metrics=metrics)


def test_the_speeds_of_a_core_are_found_in_the_phases_of_runs():
    first = bench_step_time.FIRST_GUESS
    true = dataclasses.replace(
        first, peak_flops=5e10, launch_s=8e-5, engine_step_s=3e-2, engine_request_s=4e-4,
        update_overhead_s=0.6, driver_token_s=3e-5,
    )  # fmt: skip
    sizes = zip(bench_step_time.CALIBRATION, (128, 768, 256), strict=True)
    runs = [run_that_takes(true, run, number) for run, number in sizes]
    found = bench_step_time.fit_speeds(runs)
    for run in bench_step_time.CASES:
        one = run_that_takes(true, run, 512)
        for line in bench_step_time.compare(one, found):
            assert line["ratio"] == pytest.approx(1, abs=0.05), line["case"]
    assert found.engine_step_s == pytest.approx(true.engine_step_s, rel=0.1)


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
    with pytest.raises(RuntimeError):
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
