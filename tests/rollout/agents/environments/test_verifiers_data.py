"""The tasks of a verifiers environment as prompts, which name their tasks."""

import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import read_prompts
from tests.rollout.agents.environments.fake_packages import (
    Games,
    VerifiersTaskset,
    install_verifiers,
)
from tools.convert_verifiers import main


@pytest.fixture
def convert(monkeypatch, tmp_path):
    install_verifiers(Games(), monkeypatch)
    file = tmp_path / "train.parquet"
    return file, lambda *more: main(
        ["--environment", "{taskset: {id: numbers}}", "--output", str(file), *more]
    )


def test_prompts_name_their_tasks(convert):
    file, run = convert
    assert run() == 0
    found = read_prompts([DataFile(path=str(file))], DataConfig(), key="data.train")
    prompts = [item.prompt for item in found]
    assert [item.extra_info["environment_kwargs"] for item in prompts] == [
        {"index": 0},
        {"index": 1},
        {"index": 2},
    ]
    assert prompts[2].ground_truth == "2"
    assert [message["content"] for message in prompts[2].messages] == ["Answer.", "Question 2"]


def test_infinite_tasks_need_a_limit(convert, monkeypatch):
    file, run = convert
    monkeypatch.setattr(VerifiersTaskset, "bounded", False)
    assert run() == 2
    assert not file.exists()
    assert run("--limit", "2") == 0
