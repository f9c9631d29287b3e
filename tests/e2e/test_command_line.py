"""Bad input ends in one screen with exit code 2 before Ray starts; Ctrl-C ends everything."""

import json
import os
import shutil
import signal

import pandas as pd
import pytest

from mega_agentrl.train.resume import run_state
from mega_agentrl.train.signals import EXIT_CODES
from tests.e2e.conftest import ROOT, finish, is_alive, processes_of, start, title_of, wait_until
from tests.e2e.overrides import asset_overrides

CALLS_MAIN = """
import contextlib, io, json, os, sys
from mega_agentrl import cli

slow = ("torch", "ray", "transformers", "vllm", "megatron")
cases, answers = json.load(open(sys.argv[1])), {}
for name, arguments in cases.items():
    sys.argv[1:] = arguments
    shown, code = io.StringIO(), 0
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    loaded = [library for library in slow if library in sys.modules]
    answers[name] = [code, shown.getvalue(), loaded]
print(json.dumps(answers))
"""
"""Runs one command line after the other in one process, so that each imports its libraries once.

Prints the exit code and the output of each, and which of the slow libraries are imported by then.
"""


def run(*arguments, timeout_s=300, **options):
    return finish(start(*arguments, **options), timeout_s)


def other_architecture(assets, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(assets / "model", folder)
    path = folder / "config.json"
    model = json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"]}
    path.write_text(json.dumps(model))
    return f"model.path={folder}"


def parquet_without_truth(assets, tmp_path):
    path = tmp_path / "less.parquet"
    pd.read_parquet(assets / "train.parquet").drop(columns=["reward_model"]).to_parquet(path)
    return f"data.train={path}"


def loss_of_one_argument(assets, tmp_path):
    file = tmp_path / "own.py"
    head = "import torch\n\n\n@register_loss('own', metrics=())\n"
    file.write_text(f"{head}def loss(logp_BT):\n    return torch.zeros(()), {{}}\n")
    return f"algo.loss={file}"


def rule_without_a_decision(assets, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import torch\n\n\nclass Branching(BranchPolicy):\n    pass\n")
    return f"rollout.branching={file}"


def reward_of_one_argument(assets, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import torch\n\n\ndef compute_score(text):\n    return 1.0\n")
    return f"+reward.functions.mine={file} +reward.rubric.default={{mine:1}}"


def run_folder_below_a_file(assets, tmp_path):
    (tmp_path / "file").touch()
    return f"run_dir={tmp_path}/file/run"


def parquet_without_truth_with_an_own_loss(assets, tmp_path):
    return f"{parquet_without_truth(assets, tmp_path)} algo.loss={ROOT}/examples/my_loss.py"


# One for each stage, in the order in which the stages come.
BAD_INPUT = {
    "name of a key": (lambda a, t: "rollout.branchin=none", "'rollout.branching'"),
    "group given twice": (lambda a, t: "algo=grpo algo=ppo", "one choice of the config group algo"),
    "type of a value": (lambda a, t: "optim.lr=fast", "optim.lr"),
    "run folder": (run_folder_below_a_file, "file is a file"),
    "range of a value": (lambda a, t: "rollout.top_p=1.5", "rollout.top_p=1.5"),
    "value that Hydra resolves": (
        lambda a, t: "algo.loss_options.clip_hihg=1 tool.cache.path=${hydra:runtime.cwd}/cache",
        "the nearest is clip_high",
    ),
    "model folder": (other_architecture, "MambaForCausalLM"),
    "own branching rule": (rule_without_a_decision, "Branching does not define num_forks"),
    "own loss": (loss_of_one_argument, "the arguments of loss are (logp_BT)"),
    "option": (lambda a, t: "algo.loss_options.clip_hihg=0.3", "the nearest is clip_high"),
    "own reward": (reward_of_one_argument, "compute_score also needs text"),
    "host size": (lambda a, t: "parallel.data=64", "more ranks than"),
    "data": (parquet_without_truth, "reward_model"),
    "data with an own loss": (parquet_without_truth_with_an_own_loss, "reward_model"),
    "tokenizer": (lambda a, t: "data.max_prompt_tokens=17", "data.truncation=drop"),
}


WITH_FOLDER = (
    "value that Hydra resolves",
    "host size",
    "data",
    "data with an own loss",
    "tokenizer",
)
"""Stages after Hydra has created the run folder."""


HELP = {
    "overview": ([], 0, ("experiment=NAME", "smoke_ci  ", "rollout.branch  ", "seed=1  ")),
    "sections": (
        ["optim", "rollout.branch"],
        0,
        ("optim.lr=1e-06  ", "rollout.branch.tau=0.5  "),
    ),
    "unknown": (["optm"], 2, ("nearest is optim",)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder for each stage."""
    return {stage: tmp_path_factory.mktemp("stage") for stage in BAD_INPUT}


@pytest.fixture(scope="module")
def answers(assets, folders, tmp_path_factory):
    """Return exit code, output and imported slow libraries of each command, the fastest first."""
    commands = {name: ["--help", *names] for name, (names, _, _) in HELP.items()}
    for stage, (change, _) in BAD_INPUT.items():
        folder = folders[stage]
        changes = change(assets, folder).split()
        commands[stage] = [
            "experiment=smoke_ci",
            *asset_overrides(assets, folder / "run"),
            *changes,
        ]
    file = tmp_path_factory.mktemp("commands") / "commands.json"
    file.write_text(json.dumps(commands))
    code, output = run(str(file), program=("-c", CALLS_MAIN))
    assert code == 0, output
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("stage", BAD_INPUT)
def test_bad_input_is_one_screen_and_exit_code_2_before_slow_imports(stage, answers, folders):
    code, output, loaded = answers[stage]
    assert code == 2, output
    assert BAD_INPUT[stage][1] in output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 23, "more than one screen"
    run_dir = folders[stage] / "run"
    assert run_dir.exists() == (stage in WITH_FOLDER)
    assert stage not in WITH_FOLDER or run_dir.stat().st_mode & 0o777 == 0o700
    assert loaded == (["transformers"] if stage == "tokenizer" else [])


@pytest.mark.parametrize("name", HELP)
def test_help_is_shown_before_slow_imports(name, answers):
    _, expected_code, facts = HELP[name]
    code, output, loaded = answers[name]
    assert (code, loaded) == (expected_code, []), output
    for fact in facts:
        assert fact in output


def test_missing_bubblewrap_is_named(assets, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = run("experiment=smoke_ci", *asset_overrides(assets, tmp_path / "run"))
    assert code == 2, output
    assert "bubblewrap" in output


def test_a_sweep_goes_on_after_a_job_that_failed_and_ends_with_its_table(assets, tmp_path):
    words = asset_overrides(assets, tmp_path / "sweep")
    code, output = run("-m", "experiment=smoke_ci", *words, "optim.lr=-1,-2")
    assert code == 1, output
    table = (tmp_path / "sweep" / "comparison.md").read_text()
    assert table in output
    assert {path.name for path in (tmp_path / "sweep").glob("*/")} == {"0-lr-1", "1-lr-2"}
    for lr in (1, 2):
        assert f"| optim.lr=-{lr} | 0 of 1 |" in table
        assert f"failed: optim.lr=-{lr}.0: expected" in table
    assert "Traceback" not in output


def in_rl(run_dir, find_titles):
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and '"rl"' in metrics.read_text()


def engine_is_starting(run_dir, find_titles):
    return (run_dir / "logs" / "engine0.log").exists()


def ray_is_starting(run_dir, find_titles):
    return any("gcs_server" in title for title in find_titles())


@pytest.mark.parametrize(
    ("moment", "signal_number", "send"),
    [
        pytest.param(engine_is_starting, signal.SIGTERM, os.kill, marks=pytest.mark.slow(45)),
        pytest.param(ray_is_starting, signal.SIGTERM, os.killpg, marks=pytest.mark.extended),
        pytest.param(in_rl, signal.SIGINT, os.kill, marks=pytest.mark.slow(60)),
    ],
    ids=["engine_starts", "ray_starts_group", "in_rl"],
)
def test_a_signal_ends_every_process(moment, signal_number, send, assets, tmp_path, monkeypatch):
    marker = f"MEGA_AGENTRL_TEST_RUN={tmp_path}"
    monkeypatch.setenv(*marker.split("=", 1))
    run_dir = tmp_path / "run"
    length = ("sft.max_steps=4", "total_steps=1000")
    child = start("experiment=smoke_ci", *length, *asset_overrides(assets, run_dir))

    def find_titles():
        return [title_of(process) for process in processes_of(child, marker)]

    try:
        wait_until(lambda: moment(run_dir, find_titles), 400)
        if moment is in_rl:
            # What /proc tells about other processes is not of one moment.
            wait_until(lambda: any("EngineCore" in title for title in find_titles()), 400)
        before = processes_of(child, marker)
        send(child.pid, signal_number)
        # Ten seconds are promised; a busy machine gets more.
        wait_until(lambda: not any(map(is_alive, before)) and not processes_of(child, marker), 120)
        code, output = finish(child, 120)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert code == EXIT_CODES[signal_number], output[-2000:]
    assert signal.Signals(signal_number).name in output
    if moment is in_rl:
        newest = run_state.valid_checkpoints(run_dir)[0]
        assert newest.parent.name == "checkpoints"
        assert str(newest) in output
    else:
        assert not run_state.valid_checkpoints(run_dir)
    assert "Traceback" not in output
