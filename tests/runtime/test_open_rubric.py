"""`open_rubric` starts only the processes that are needed, checks them and closes them."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.runtime import rubric as module
from mega_agentrl.runtime.rubric import (
    check_reward_environment,
    check_reward_functions,
    open_rubric,
)
from tests.config.refusals import refused, refused_setting
from tests.fakes import make_trajectory

MINE = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "key": os.environ.get("MINE_KEY"), "other": os.environ.get("OTHER")}
"""
WAIT_S = 300.0


def mine(tmp_path, text=MINE, **changes):
    (tmp_path / "mine.py").write_text(text)
    values = {
        "rubric": {"default": {"mine": 1.0}},
        "functions": {"mine": f"{tmp_path}/mine.py", "unused": "no_such_module"},
        "worker_env_vars": ["MINE_KEY"],
        "num_workers": 1,
    }
    return RewardConfig(**(values | changes))


def test_nothing_is_started_without_user_functions(monkeypatch):
    monkeypatch.setattr(module, "WorkerPool", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(module, "LLMJudge", lambda *_, **__: pytest.fail("started"))
    with open_rubric(RewardConfig()) as rubric:
        assert not isinstance(rubric.score(make_trajectory()), Future)


def test_user_functions_see_only_the_named_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE_KEY", "secret")
    monkeypatch.setenv("OTHER", "other")
    with open_rubric(mine(tmp_path)) as rubric:
        score = rubric.score(make_trajectory()).result(WAIT_S)
        assert score.extra_info == {"mine": {"key": "secret", "other": None}}
    with pytest.raises(RuntimeError):
        rubric.score(make_trajectory())


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("x = 1", "no compute_score"),
        ("\nimport nothing_of_this_name\n", "/mine.py, line 2)"),
        (
            "import os\nassert os.environ['MINE_KEY'] == 'secret'\nraise OSError('no file')\n",
            "no f",
        ),
        ("import sys\nsys.exit('no licence')\n", "SystemExit: no licence"),
        ("import os\nos._exit(3)\n", "exit code 3"),
    ],
    ids=["no function", "import", "error", "exit", "death"],
)
def test_a_function_that_cannot_be_loaded_is_refused_with_its_part(
    tmp_path, monkeypatch, text, cause
):
    monkeypatch.setenv("MINE_KEY", "secret")
    path = f"{tmp_path}/mine.py"
    error = refused(check_reward_functions, mine(tmp_path, text, functions={"mine": path}))
    assert (error.key, error.got) == ("reward.functions.mine", path)
    assert cause in error.cause and "worker pool" not in str(error)


def test_the_variables_of_the_workers_must_be_set(tmp_path, monkeypatch):
    monkeypatch.delenv("MINE_KEY", raising=False)
    missing = refused_setting(open_rubric(mine(tmp_path)).__enter__)
    assert missing == ("reward.worker_env_vars", "MINE_KEY")


def test_missing_variables_are_found_without_starting_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WorkerPool", lambda *_, **__: pytest.fail("started"))
    judge = RewardModelConfig(path_or_url="http://a", served_model_name="b", api_key_env="KEY")
    configs = {
        "MINE_KEY": mine(tmp_path),
        "KEY": RewardConfig(rubric={"default": {"model": 1.0}}, model=judge),
    }
    for name, config in configs.items():
        monkeypatch.delenv(name, raising=False)
        assert refused_setting(check_reward_environment, config)[1] == name
        monkeypatch.setenv(name, "secret")
        check_reward_environment(config)
    check_reward_environment(RewardConfig(model=judge))


def test_judge_gets_its_key_and_its_prompt_and_is_closed(monkeypatch, tmp_path):
    made = []

    def judge(*args, **kwargs):
        made.append(SimpleNamespace(args=args, kwargs=kwargs, closed=0, close=close))
        return made[-1]

    def close():
        made[-1].closed += 1

    monkeypatch.setattr(module, "LLMJudge", judge)
    model = RewardModelConfig(
        path_or_url="http://here/v1", served_model_name="grader", api_key_env="JUDGE_KEY"
    )
    config = RewardConfig(rubric={"default": {"model": 1.0}}, model=model, timeout_s=7.0)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    missing = refused_setting(open_rubric(config).__enter__)
    assert missing == ("reward.model.api_key_env", "JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "k")
    with open_rubric(config):
        assert made[0].args == ("http://here/v1", "grader")
        assert made[0].kwargs.pop("prompt").render(make_trajectory())
        assert made[0].kwargs == {"timeout_s": 7.0, "api_key": "k"}
        assert not made[0].closed
    assert made[0].closed == 1
    (tmp_path / "judge.jinja").write_text("Grade: {{ answer }}")
    config.model.prompt_file = f"{tmp_path}/judge.jinja"
    with open_rubric(config):
        assert made[1].kwargs["prompt"].render(make_trajectory()) == "Grade: "
    (tmp_path / "judge.jinja").write_text("Grade: {{ anwser }}")
    wrong = refused_setting(open_rubric(config).__enter__)
    assert wrong == ("reward.model.prompt_file", f"{tmp_path}/judge.jinja")
    local = RewardConfig(rubric={"default": {"model": 1.0}}, model=RewardModelConfig("f"))
    with open_rubric(local):
        assert len(made) == 2
