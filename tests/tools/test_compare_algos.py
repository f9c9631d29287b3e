"""The command line: what is refused, and that finished runs make table and plot at once."""

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algos", "grpo,arpoo"], "got 'arpoo', expected some of grpo, arpo, arpo_hard"),
        (["--seeds", "0"], "got 0, expected at least 1"),
        (["--tokens", "9", "--steps", "2"], "not allowed with argument"),
        (["optm.lr=1"], "unknown key 'optm.lr'; nearest known is 'optim.lr'"),
        (["model.path=/nowhere"], "there is no config.json in it"),
        (["algo.ares.bootstrap=true", "algo.ares.mode=paper"], "ares.bootstrap=True: expected"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, message, assets, tmp_path, capsys):
    given = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    assert exit_code(["--out", str(tmp_path / "out"), *given, *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert not (tmp_path / "out").exists()


@pytest.fixture
def arguments(assets, tmp_path):
    given = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    choice = ["--algos", "arpo_egpo,grpo", "--seeds", "1,2", "--steps", "2"]
    return ["--out", str(tmp_path / "out"), *choice, *given]


def finish_all(arguments):
    """Results of all runs, as if they had been made: GRPO ends at 0.5, the other at 0.7."""
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


def test_finished_runs_are_only_read(arguments, tmp_path, capsys):
    finish_all(arguments)
    assert compare_algos.main(arguments) == 0
    out = tmp_path / "out"
    table = (out / "comparison.md").read_text()
    lines = table.splitlines()
    assert lines[2].startswith("| GRPO | 2 | 0.500 ± 0.000 |")
    # 0.5 on the way from 0.2 to 0.7 is 3/5 of 50 calls.
    assert lines[3].startswith("| ARPO + EGPO | 2 | 0.700 ± 0.000 |")
    assert lines[3].endswith("| 30 | 60% |")
    assert "`algo.egpo.cot_blocks=response`" in table
    assert "Budget: 2 steps a run" in table
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
    assert "got a run with other values of budget.num_steps" in capsys.readouterr().err
