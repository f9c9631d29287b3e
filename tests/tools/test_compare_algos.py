"""The command line of `tools/compare_algos.py`, without a run."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mega_agentrl.report.compare.algorithms import EvalCostPoint
from tests.e2e.overrides import asset_overrides
from tools import compare_algos
from tools.compare.run import RESULT, claim_folder, write_json


def exit_code(arguments):
    try:
        return compare_algos.main(arguments)
    except SystemExit as ended:  # as argparse ends it
        return ended.code


@pytest.fixture
def inputs(assets, tmp_path):
    overrides = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    return ["--out", str(tmp_path / "out"), *overrides]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--algos", "grpo,arpoo"], "'arpoo'"),
        (["--seeds", "0"], "got 0"),
        (["--tokens", "9", "--steps", "2"], "not allowed"),
        (["optm.lr=1"], "'optim.lr'"),
        (["model.path=/nowhere"], "config.json"),
        (["algo.ares.bootstrap=true", "algo.ares.mode=paper"], "algo.ares.bootstrap=True"),
    ],
    ids=["algorithm", "seed", "two budgets", "key", "model", "bootstrap"],
)
def test_bad_input_is_refused_before_anything_starts(arguments, fact, inputs, tmp_path, capsys):
    assert exit_code([*inputs, *arguments]) == 2
    printed = capsys.readouterr()
    assert fact in printed.err and printed.out == ""
    assert not (tmp_path / "out").exists()


@pytest.fixture
def arguments(inputs):
    return ["--algos", "arpo_egpo,grpo", "--seeds", "1,2", "--steps", "2", *inputs]


def finish_all(arguments):
    """Write the results of all runs: GRPO ends at 0.5, the other at 0.7."""
    args = compare_algos._parse(arguments)
    base, _ = compare_algos.make_config(args.overrides, run_dir=args.out)
    for name in args.algos:
        for seed in args.seeds:
            run = compare_algos._make_run(name, seed, args, base)
            end = EvalCostPoint(
                num_tokens=900, num_tool_calls=50, reward=0.5 + 0.2 * (name != "grpo"), success=0
            )
            marks = [EvalCostPoint(num_tokens=0, num_tool_calls=0, reward=0.2, success=0), end]
            claim_folder(Path(run.config.run_dir), run.settings)
            write_json(
                Path(run.config.run_dir) / RESULT, {"evaluations": [asdict(mark) for mark in marks]}
            )


def test_finished_runs_make_table_and_plot_at_once(arguments, tmp_path, capsys):
    finish_all(arguments)
    assert compare_algos.main(arguments) == 0
    out = tmp_path / "out"
    table = (out / "comparison.md").read_text()
    lines = table.splitlines()
    assert lines[2].startswith("| GRPO | 2 | 0.500 ± 0.000 |")
    # 0.5 on the way from 0.2 to 0.7 is 3/5 of 50 calls.
    assert lines[3].startswith("| ARPO + EGPO | 2 | 0.700 ± 0.000 |")
    assert lines[3].endswith("| 30 | 60% |")
    assert "entropy of the first chain of thought" in table
    assert "Budget: 2 steps per run" in table
    assert table in capsys.readouterr().out
    assert (out / "comparison.png").stat().st_size > 10_000
    numbers = json.loads((out / "comparison.json").read_text())
    assert [(run["algorithm"], run["seed"]) for run in numbers["runs"]] == [
        ("GRPO", 1),
        ("GRPO", 2),
        ("ARPO + EGPO", 1),
        ("ARPO + EGPO", 2),
    ]


def test_results_of_another_budget_are_refused(arguments, capsys):
    finish_all(arguments)
    other = ["3" if one == "2" else one for one in arguments]
    assert compare_algos.main(other) == compare_algos.FAILED
    assert "budget.num_steps" in capsys.readouterr().err
