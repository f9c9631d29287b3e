"""The command line of `tools/compare_algos.py`, without a run."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mega_agentrl.report.compare.algorithms import EvalCostPoint
from tests.e2e.overrides import asset_overrides
from tools import compare_algos
from tools.compare.plan import TASKS
from tools.compare.result_file import ResultFile
from tools.compare.run import RESULT, FinishedRun, claim_folder, write_json
from tools.compare.task_runner import TaskRunner

pytestmark = pytest.mark.extended


def exit_code(arguments):
    try:
        return compare_algos.main(arguments)
    except SystemExit as ended:  # as argparse ends it
        return ended.code


@pytest.fixture
def inputs(assets, tmp_path):
    overrides = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    return ["--out", str(tmp_path / "out"), "--tasks", "toolqa", *overrides]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--algos", "grpo,arpoo"], "'arpoo'"),
        (["--tasks", "toolqb"], "'toolqb'"),
        (["--seeds", "0"], "got 0"),
        (["--seeds", "1,2", "--tuning-seed", "2"], "--tuning-seed 2"),
        (["--rates", "2"], "got 2"),
        (["--tokens", "9", "--steps", "2"], "not allowed"),
        (["optm.lr=1"], "'optim.lr'"),
        (["optim.lr=1e-4"], "--rates"),
        (["model.path=/nowhere"], "config.json"),
    ],
    ids=[
        "algorithm",
        "task",
        "seed",
        "tuning seed",
        "rate",
        "two budgets",
        "key",
        "learning rate",
        "model",
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, fact, inputs, tmp_path, capsys):
    assert exit_code([*inputs, *arguments]) == 2
    printed = capsys.readouterr()
    assert fact in printed.err and printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_list_names_runs_input_and_reasons(inputs, tmp_path, capsys):
    arguments = [*inputs, "--algos", "grpo,gigpo", "--seeds", "1,2,3", "--rates", "1e-4,2e-4"]
    assert compare_algos.main([*arguments, "rollout.max_turns=1", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "toolqa: 5 runs of 100,000 tokens" in printed and "--out runs/toolqa" in printed
    assert "algorithms: grpo\n" in printed
    assert "skipped: gigpo: it compares turns" in printed
    assert not (tmp_path / "out").exists()


@pytest.fixture
def arguments(inputs):
    return ["--algos", "arpo,grpo", "--seeds", "1,2", "--rates", "2e-4", "--steps", "2", *inputs]


def finish_all(arguments):
    """Write the results of all runs, and return both: GRPO ends at 0.5, the other at 0.7."""
    args = compare_algos._parse(arguments)
    options = compare_algos._make_options(args)
    runner = TaskRunner.plan(TASKS["toolqa"], options, args.algos)
    finished = []
    for run in runner.scored_runs:
        reward = 0.5 + 0.2 * (run.algorithm != "grpo")
        end = EvalCostPoint(num_tokens=900, num_tool_calls=50, reward=reward, success=0)
        start = replace(end, num_tokens=0, num_tool_calls=0, reward=0.2)
        folder = Path(run.config.run_dir)
        claim_folder(folder, run.settings)
        finished.append((run, FinishedRun(evaluations=(start, end))))
        write_json(folder / RESULT, finished[-1][1])
    return finished


def test_finished_runs_make_page_figure_and_tables_at_once(arguments, tmp_path, capsys):
    finish_all(arguments)
    page = tmp_path / "docs" / "scoreboard.md"
    assert compare_algos.main([*arguments, "--page", str(page)]) == 0
    out = tmp_path / "out"
    text = page.read_text()
    assert "`arpo` is better than `grpo`" in text
    assert "    tools/compare_algos.py --algos arpo,grpo --seeds 1,2" in text
    assert text in capsys.readouterr().out
    assert text == (out / "scoreboard.md").read_text()
    assert page.with_name("scoreboard.svg").read_bytes() == (out / "scoreboard.svg").read_bytes()
    lines = (out / "toolqa" / "comparison.md").read_text().splitlines()
    # 0.5 on the way from 0.2 to 0.7 is 3/5 of 50 calls.
    assert lines[2].startswith("| arpo | 2 | 0.700 ± 0.000 |")
    assert lines[2].endswith("| 30 | 60% |")
    assert (out / "toolqa" / "comparison.png").stat().st_size > 10_000
    numbers = json.loads((out / "scoreboard.json").read_text())["toolqa"]
    assert [row["verdict"] for row in numbers["rows"]] == ["better", "baseline"]
    assert [(run["algorithm"], run["seed"]) for run in numbers["runs"]] == [
        ("arpo", 1),
        ("arpo", 2),
        ("grpo", 1),
        ("grpo", 2),
    ]


def test_the_lines_of_a_results_file_suffice_for_the_page(arguments, tmp_path):
    results, page = tmp_path / "results.jsonl", tmp_path / "scoreboard.md"
    for run, result in finish_all(arguments):
        ResultFile(results).append("toolqa", run, result, "abc1234")
    shutil.rmtree(tmp_path / "out")
    assert compare_algos.main([*arguments, "--results", str(results), "--page", str(page)]) == 0
    assert "`arpo` is better than `grpo`" in page.read_text()


def test_the_commit_is_dirty_if_more_than_the_results_has_changed(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    code, results = tmp_path / "code.py", tmp_path / "results.jsonl"
    git("init")
    for path in (code, results):
        path.write_text("before")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-m", "first")
    monkeypatch.setattr(compare_algos, "ROOT", tmp_path)
    elsewhere = Path("/elsewhere/results.jsonl")
    results.write_text("after")
    commit = compare_algos._commit([results, elsewhere])
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    assert compare_algos._commit([elsewhere]) == f"{commit}-dirty"
    code.write_text("after")
    assert compare_algos._commit([results]) == f"{commit}-dirty"


def test_results_of_another_budget_are_refused(arguments, capsys):
    finish_all(arguments)
    other = ["3" if one == "2" else one for one in arguments]
    assert compare_algos.main(other) == compare_algos.FAILED
    assert "budget.num_steps" in capsys.readouterr().err
