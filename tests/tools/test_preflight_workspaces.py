"""The preflight runs set-up and reward command of each row in a workspace without any change."""

import json

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.tools import ToolConfig, WorkspaceToolConfig
from tools.preflight_parts.workspaces import check_workspaces

GOOD = ("touch done", "grep -q right answer.txt")


@pytest.fixture
def check(tmp_path):
    """Checks rows, each a pair of commands or the names of its tools."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "answer.txt").write_text("wrong\n")
    tmp_path.chmod(0o755)

    def run(*rows, **workspace):
        path = tmp_path / "train.jsonl"
        lines = [
            {
                "prompt": f"Task {number}",
                "data_source": "project",
                "reward_model": {"ground_truth": ""},
                "extra_info": {"index": number, "tools_kwargs": tools_of(row)},
            }
            for number, row in enumerate(rows)
        ]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        section = WorkspaceToolConfig(
            root="host",
            folder=str(folder),
            num_workers=1,
            disk_limit_mib=32,
            memory_limit_mib=512,
            **workspace,
        )
        config = TrainConfig(data=DataConfig(train=str(path)), tool=ToolConfig(workspace=section))
        return check_workspaces(config)

    return run


def tools_of(row):
    if isinstance(row, list):
        return {name: {} for name in row}
    setup, reward = row
    return {
        "edit": {},
        "bash": {"create_kwargs": {"setup_command": setup, "reward_command": reward}},
    }


def test_rows_that_work_are_counted_and_equal_ones_run_once(check):
    problems, (note,) = check(GOOD, GOOD, ("", GOOD[1]), ["python"])
    assert problems == []
    assert "3 rows with 2 different pairs" in note


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("cat missing.txt", GOOD[1]), "the setup command 'cat missing.txt' failed"),
        (("", "grep -q wrong answer.txt"), "succeeds before any change"),
        (("echo right > answer.txt", GOOD[1]), "succeeds before any change"),
        (("", "no-such-program --check"), "cannot run"),
    ],
    ids=["set-up fails", "reward without work", "set-up does the work", "no such program"],
)
def test_row_whose_commands_cannot_work_is_named(check, row, message):
    (problem,), notes = check(GOOD, row)
    assert problem.config_key == "data.train"
    assert problem.message.startswith("row project/1: ")
    assert message in problem.message
    assert notes == []


def test_commands_of_the_run_hold_for_rows_without_their_own(check):
    (problem,), _ = check(["bash"], ["edit"], reward_command="true")
    assert problem.config_key == "tool.workspace.reward_command"
    (problem,), _ = check(["bash"], setup_command="exit 3", reward_command="false")
    assert problem.config_key == "tool.workspace.setup_command"


def test_reward_command_that_does_not_end_is_a_problem(check):
    (problem,), _ = check(("", "sleep 600"), reward_timeout_s=0.5)
    assert "tool.workspace.reward_timeout_s=0.5" in problem.message


def test_many_rows_with_problems_are_counted(check):
    problems, _ = check(*(("", f": {number}") for number in range(13)))
    assert len(problems) == 11
    assert problems[-1].message == "3 more rows have a problem"


def test_run_without_workspaces_starts_none(check):
    assert check_workspaces(TrainConfig()) == ([], [])
