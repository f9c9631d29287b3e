"""Files that must exist, and settings of data, rewards and trackers that exclude each other."""

import sys

import pytest

from mega_agentrl.config.checks import inputs
from mega_agentrl.config.checks.inputs import (
    check_data,
    check_images,
    check_report,
    check_reward,
    check_run_dir,
    check_workspace,
)
from mega_agentrl.config.enums import Branching, FilterMetric, TrackerName, Truncation
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.config.sections.runtime import ReportConfig
from mega_agentrl.config.sections.tools import WorkspaceToolConfig
from tests.config.refusals import refused, refused_setting


@pytest.fixture
def config(tmp_path):
    for name in ("a.parquet", "b.jsonl", "held_out.parquet", "t.jinja"):
        (tmp_path / name).touch()
    train = [str(tmp_path / "a.parquet"), f"{tmp_path}/b.jsonl@0.5"]
    return TrainConfig(data=DataConfig(train=train, validation=str(tmp_path / "held_out.parquet")))


def test_every_local_file_must_exist(config):
    check_data(config)
    config.data.train.append("s3://bucket/c.parquet")
    check_data(config)
    config.data.train.append("nowhere.jsonl@2")
    assert refused_setting(check_data, config) == ("data.train", "nowhere.jsonl")
    config.data.train[-1] = "file:///nowhere.jsonl"
    assert refused_setting(check_data, config) == ("data.train", "/nowhere.jsonl")
    config.data.dataset_class = "my.module:Rows"
    check_data(config)


@pytest.mark.parametrize(
    ("root", "folder", "key"),
    [
        ("host", "nowhere", "tool.workspace.folder"),
        ("nowhere", "", "tool.workspace.root"),
        ("host", ".", None),
        ("", "nowhere", None),
    ],
    ids=["no folder", "no root", "both", "disabled"],
)
def test_the_folders_of_a_workspace_must_exist(config, root, folder, key):
    config.tool.workspace = WorkspaceToolConfig(root=root, folder=folder)
    if key is None:
        check_workspace(config)
    else:
        assert refused_setting(check_workspace, config) == (key, "nowhere")


def test_a_prompt_template_must_exist(config, tmp_path):
    config.data.prompt_template = str(tmp_path / "t.jinja")
    check_data(config)
    config.data.prompt_template = "nowhere.jinja"
    assert refused_setting(check_data, config) == ("data.prompt_template", "nowhere.jinja")


@pytest.mark.parametrize("truncation", list(Truncation))
def test_a_cut_prompt_cannot_be_rendered_again(config, truncation):
    config.data.truncation = truncation
    check_data(config)
    config.rollout.use_inference_chat_template = True
    if truncation in (Truncation.error, Truncation.drop):
        check_data(config)
    else:
        assert refused_setting(check_data, config) == ("data.truncation", truncation)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("zoom", "enabled", True), ("data", "min_pixels", 784), ("data", "max_pixels", 784)],
    ids=["zoom", "min_pixels", "max_pixels"],
)
def test_only_a_model_with_a_vision_tower_has_images(section, name, value):
    config = TrainConfig()
    setattr(config.data if section == "data" else config.tool.zoom, name, value)
    check_images(config, {"vision_config": {}})
    key = f"{'data' if section == 'data' else 'tool.zoom'}.{name}"
    assert refused_setting(check_images, config, {}) == (key, value)


def test_the_released_rollout_shows_no_images_of_tools():
    config = TrainConfig(rollout=RolloutConfig(branching=Branching.released))
    check_images(config, {"vision_config": {}})
    config.tool.zoom.enabled = True
    error = refused(check_images, config, {"vision_config": {}})
    assert error.key == "tool.zoom.enabled"


def test_an_enlarged_region_is_within_the_bound_of_images():
    config = TrainConfig(data=DataConfig(max_image_pixels=1024**2))
    config.tool.zoom.enabled = True
    check_images(config, {"vision_config": {}})
    config.data.max_image_pixels -= 1
    setting = refused_setting(check_images, config, {"vision_config": {}})
    assert setting == ("tool.zoom.max_side", 1024)
    config.tool.zoom.enabled = False
    check_images(config, {"vision_config": {}})


def reward_settings(filter_metric=FilterMetric.none, **reward):
    return TrainConfig(
        reward=RewardConfig(**reward), rollout=RolloutConfig(filter_metric=filter_metric)
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return RewardModelConfig(path_or_url=str(tmp_path))


def test_every_filter_passes_without_a_reward_model():
    for key in FilterMetric:
        check_reward(reward_settings(key))


@pytest.fixture
def reward_file(tmp_path):
    """Write a file with the given text and return its path."""

    def write(text):
        file = tmp_path / "reward.py"
        file.write_text(text + "\n")
        return str(file)

    return write


FOUR = "data_source, solution_str, ground_truth, extra_info"


def check_own_reward(reference):
    rubric = {"default": {"mine": 1.0}}
    check_reward(reward_settings(functions={"mine": reference}, rubric=rubric))


@pytest.mark.parametrize(
    "text",
    [
        f"def compute_score({FOUR}): ...",
        f"def compute_score({FOUR}=None, *, scale=2.0): ...",
        "def compute_score(solution_str, **rest): ...",
        f"async def compute_score({FOUR}=None, **kwargs): ...",
        "class compute_score:\n    async def __call__(self, **values): ...",
        "def compute_score(solution_str, ground_truth, method='strict'): ...",
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...",
        "def compute_score(reward_inputs, format_weight=0.1): ...",
        "async def compute_score(prompts, completions, answer, **kwargs): ...",
        "from elsewhere import compute_score",
        "compute_score = make()",
        "@wrap\ndef compute_score(): ...",
        "if True:\n    def compute_score(): ...",
        "from elsewhere import *",
    ],
    ids=[
        "four",
        "options",
        "rest",
        "async",
        "class",
        "gsm8k",
        "batched",
        "easy_r1",
        "trl",
        "import",
        "assigned",
        "decorated",
        "nested",
        "star",
    ],
)
def test_a_reward_that_may_work_passes(reward_file, text):
    check_own_reward(reward_file(text))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "def compute_scores(): ...",
            "the nearest name is compute_scores",
        ),
        ("def compute_score(text): ...", "also needs text"),
        (f"def compute_score({FOUR}, scale): ...", "also needs scale"),
        (f"def compute_score({FOUR}, /): ...", "by position"),
        ("def compute_score(queries, prompts, labels): ...", "also needs labels, queries"),
        ("def compute_score(:", "SyntaxError"),
    ],
    ids=["name", "too_few", "too_many", "positional", "openrlhf", "syntax"],
)
def test_a_reward_that_cannot_work_is_refused_without_importing_it(reward_file, text, cause):
    reference = reward_file(f"import a_missing_package\n{text}")
    error = refused(check_own_reward, reference)
    assert (error.key, error.got) == ("reward.functions.mine", reference)
    assert cause in error.cause


@pytest.mark.parametrize("reference", ["nowhere/reward.py", "nowhere.reward:score"])
def test_a_reward_in_a_missing_file_is_refused(reference):
    assert refused_setting(check_own_reward, reference) == ("reward.functions.mine", reference)


def test_the_run_folder_can_be_created(tmp_path):
    (tmp_path / "file").touch()
    check_run_dir(str(tmp_path))
    check_run_dir(str(tmp_path / "new" / "run"))
    for name in ("file", "file/run", "file/runs/run"):
        error = refused(check_run_dir, str(tmp_path / name))
        assert (error.key, error.got) == ("run_dir", str(tmp_path / name))
        assert f"{tmp_path}/file is a file" in error.cause


def test_the_run_folder_is_in_a_folder_that_may_be_written(tmp_path, monkeypatch):
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    error = refused(check_run_dir, str(tmp_path / "a" / "run"))
    assert error.key == "run_dir" and str(tmp_path) in error.cause


def test_functions_have_a_weight_and_worker_env_vars_have_functions(reward_file):
    mine = {"functions": {"mine": "m:f"}}
    unweighted = refused_setting(check_reward, reward_settings(**mine))
    assert unweighted == ("reward.functions.mine", "m:f")
    mine = {"functions": {"mine": reward_file("def compute_score(**values): ...")}}
    used = mine | {"rubric": {"default": {"arpo": 1.0, "mine": 1.0}}, "worker_env_vars": ["KEY"]}
    check_reward(reward_settings(FilterMetric.reward, **used))
    unread = refused_setting(check_reward, reward_settings(worker_env_vars=["KEY"]))
    assert unread == ("reward.worker_env_vars", ["KEY"])


def test_a_reward_model_is_a_folder_or_a_url(folder):
    rubric = {"default": {"arpo": 1.0, "model": 1.0}}
    check_reward(reward_settings(rubric=rubric, model=folder))
    remote = RewardModelConfig(
        path_or_url="http://host/v1", served_model_name="judge", api_key_env="KEY"
    )
    for key in FilterMetric:
        check_reward(reward_settings(key, rubric=rubric, model=remote))
    missing = RewardModelConfig(path_or_url="host:8000/v1")
    no_folder = refused_setting(check_reward, reward_settings(rubric=rubric, model=missing))
    assert no_folder == ("reward.model.path_or_url", "host:8000/v1")
    folder.api_key_env = "KEY"
    unsent = refused_setting(check_reward, reward_settings(rubric=rubric, model=folder))
    assert unsent == ("reward.model.api_key_env", "KEY")


def test_a_filter_cannot_use_a_hosted_reward_model(folder):
    second = {"default": {"arpo": 1.0, "model": 1.0}}
    first = {"judged": {"model": 1.0}, "default": {"arpo": 1.0}}
    check_reward(reward_settings(FilterMetric.accuracy, rubric=second, model=folder))
    check_reward(reward_settings(rubric=first, model=folder))
    late = refused(check_reward, reward_settings(FilterMetric.reward, rubric=second, model=folder))
    assert (late.key, late.got) == ("rollout.filter_metric", FilterMetric.reward)
    assert late.expected.startswith("accuracy")
    for key in (FilterMetric.reward, FilterMetric.accuracy):
        late = refused(check_reward, reward_settings(key, rubric=first, model=folder))
        assert (late.key, late.got) == ("rollout.filter_metric", key)
        assert "model decides judged" in late.expected


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_with_the_line_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    report = ReportConfig(trackers=[TrackerName.tensorboard, TrackerName(name)])
    error = refused(check_report, report)
    assert (error.key, error.got) == ("report.trackers", name)
    assert f"`pip install {name}`" in error.expected


def test_installed_packages_pass_and_are_not_imported(monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda name: object())
    check_report(ReportConfig(trackers=list(TrackerName)))
    assert "mlflow" not in sys.modules


def test_only_requested_trackers_are_looked_for(monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda name: pytest.fail(f"looked for {name}"))
    check_report(ReportConfig())
    check_report(ReportConfig(trackers=[]))
