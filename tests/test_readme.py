"""What README.md shows can be copied: its commands, keys and files exist."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from mega_agentrl.config.override_keys import (
    check_overrides,
    parse_command_line,
    register_schema,
)
from mega_agentrl.config.paths import find_config_dir
from tests.e2e.conftest import finish, start

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
OWN_DATA = "data.train=examples/my_questions.jsonl"


def shell_lines():
    """Commands of the blocks without a language, in one line each, without comments."""
    parts = re.split(r"^```(.*)\n", README.read_text(), flags=re.M)
    # Text, then language and content of a block, then the empty language and text after it.
    blocks = [text for language, text in zip(parts[1::4], parts[2::4], strict=True) if not language]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


COMMANDS = list(shell_lines())
RUNS = [
    words[words.index("mega_agentrl") + 1 :]
    for words in COMMANDS
    if words[:2] == [".venv/bin/python", "-m"]
]


def test_the_readme_has_at_most_250_lines():
    assert len(README.read_text().splitlines()) <= 250


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {words[1] for words in COMMANDS if words[0] == "make"}
    named |= set(re.findall(r"`(?:\S+ )?make ([a-z-]+)", README.read_text()))
    assert {"smoke", "test", "preflight"} <= named <= targets


def test_files_of_the_readme_exist():
    folders = ("configs", "docs", "examples", "slurm", "tools", "tests", "mega_agentrl")
    pattern = rf"(?<![\w/.])((?:{'|'.join(folders)})/[\w./-]*[\w/])"
    named = set(re.findall(pattern, README.read_text()))
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[-1])
def test_keys_and_values_of_the_runs_in_the_readme_are_accepted(words):
    register_schema()
    folder = find_config_dir()
    command = parse_command_line(words)
    overrides = [one for one in command.overrides if not one.endswith("=...")]
    check_overrides(overrides, folder)
    if command.asks_help or command.is_sweep:
        return
    with initialize_config_dir(str(folder), version_base="1.3"):
        compose("train", overrides)


def test_defaults_in_the_readme_are_those_of_the_schema():
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        defaults = compose("train", ["model=hf", "model.path=x", "data.train=x"])
        smoke = compose("train", ["experiment=smoke"])
    for config, lr, prompt, response in ((defaults, 1e-6, 1024, 2048), (smoke, 3e-4, 32, 96)):
        assert config.optim.lr == lr
        assert config.data.max_prompt_tokens == prompt
        assert config.rollout.max_response_tokens == response
        assert (config.data.prompts_per_step, config.rollout.group_size) == (32, 8)
    (row,) = [one for one in README.read_text().splitlines() if one.startswith("| `optim.lr`")]
    assert "1e-6" in row and "3e-4" in row


@pytest.mark.slow
def test_the_run_on_own_data_trains(assets, tmp_path):
    """The command as it stands, with the smoke model of the tests."""
    words = next(words for words in RUNS if OWN_DATA in words)
    replaced = ("run_dir", "model.path", "sft.train_data", "sft.dev_data", "tool.search.source")
    own = [word for word in words if word.split("=")[0] not in replaced]
    files = {
        "run_dir": tmp_path / "run",
        "model.path": f"{assets}/model",
        "sft.train_data": f"{assets}/demonstrations.parquet",
        "sft.dev_data": f"{assets}/dev.parquet",
        "tool.search.source": f"{assets}/corpus.jsonl",
    }
    code, output = finish(start(*own, *(f"{key}={path}" for key, path in files.items())), 500)
    assert code == 0, output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"stage": "rl"' in line for line in lines) == 5
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
