"""Keys and classes of other trainers: errors say what they are called here, the page lists them."""

import re
from pathlib import Path

import pytest

from mega_agentrl.config.declarations import check_keyword_function
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.override_keys import (
    check_overrides,
    check_yaml_keys,
    is_known,
    known_groups,
    known_options,
    parse_command_line,
)
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.peer_names import (
    PEER_CLASSES,
    PEER_KEYS,
    describe_class,
)
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from_verl.md").read_text()


@pytest.mark.parametrize(
    ("override", "project", "ours"),
    [
        ("actor_rollout_ref.rollout.n=8", "verl", "rollout.group_size"),
        ("rollout.n=8", "verl", "rollout.group_size"),
        ("data.train_files=a.parquet", "verl", "data.train"),
        ("algorithm.adv_estimator=grpo", "verl", "algo.advantage"),
        ("+trainer.total_epochs=3", "verl", "total_epochs"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=true", "verl", "Megatron"),
        ("actor_rollout_ref.actor.some_new_key=1", "verl", "docs/from_verl.md"),
        ("grpo.num_generations_per_prompt=8", "NeMo-RL", "rollout.group_size"),
        ("policy.generation.temperature=1", "NeMo-RL", "rollout.temperature"),
        ("n_samples_per_prompt=8", "slime", "rollout.group_size"),
    ],
)
def test_an_override_with_a_key_of_another_trainer_names_ours(override, project, ours):
    with pytest.raises(InputError) as caught:
        check_overrides([override], find_config_dir())
    assert project in caught.value.cause and ours in caught.value.cause


def test_a_mistyped_key_of_ours_has_the_nearest_name():
    with pytest.raises(InputError) as caught:
        check_overrides(["rollout.group_sise=8"], find_config_dir())
    assert "'rollout.group_size'" in caught.value.cause


@pytest.mark.parametrize("flag", ["--rollout-batch-size", "--n-samples-per-prompt=8"])
def test_a_flag_of_slime_names_our_key(flag):
    with pytest.raises(InputError) as caught:
        parse_command_line([flag, "8"])
    assert caught.value.got == flag and "slime" in caught.value.cause


def test_another_unknown_flag_ends_with_the_usage(capsys):
    with pytest.raises(SystemExit) as left:
        parse_command_line(["--no-such-flag"])
    assert left.value.code == 2 and "--no-such-flag" in capsys.readouterr().err


def test_a_yaml_file_of_verl_names_what_replaces_its_section(tmp_path):
    (tmp_path / "ppo.yaml").write_text("actor_rollout_ref: {rollout: {n: 8}}\n")
    with pytest.raises(InputError) as caught:
        check_yaml_keys(tmp_path)
    assert "verl" in caught.value.cause


@pytest.mark.parametrize(
    ("reference", "ours"),
    [
        ("verl.tools.search_tool.SearchTool", "tool.search"),
        ("verl.tools.sandbox_fusion_tools:SandboxFusionTool", "python"),
        ("verl.interactions.gsm8k_interaction.Gsm8kInteraction", "interaction.gsm8k"),
        ("nemo_rl.environments.math_environment.MathEnvironment", "reward=accuracy"),
        ("verl.somewhere.New", "docs/from_verl.md"),
    ],
)
def test_a_class_of_another_trainer_names_ours(reference, ours):
    with pytest.raises(ConfigError) as caught:
        load_user_object(reference, "tool.user_tools_file", "a tool")
    assert ours in caught.value.cause


def test_a_file_that_imports_verl_names_what_to_import(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from verl.tools.base_tool import BaseTool\n\nclass Mine(BaseTool): pass\n")
    with pytest.raises(ConfigError) as caught:
        load_user_object(f"{path}:Mine", "tool.user_tools_file", "a tool")
    assert "mega_agentrl.tool.base.Tool" in caught.value.cause


def test_a_reward_function_of_verl_names_the_rubric():
    with pytest.raises(ConfigError) as caught:
        check_keyword_function(
            "verl.utils.reward_score:default_compute_score",
            "reward.functions.mine",
            "a function",
            default_name="compute_score",
            keywords=(),
        )
    assert "reward.rubric" in caught.value.cause


@pytest.mark.parametrize("text", ["my_tools.py:Search", "import numpy", "json:loads"])
def test_code_of_nobody_else_has_no_sentence(text):
    assert describe_class(text) == ""


NO_SETTINGS = {"max_turns", "python", "search", "zoom", "FILE.py:NAME", "reward_model.ground_truth"}
OURS = [ours for names in (*PEER_KEYS.values(), *PEER_CLASSES.values()) for ours in names.values()]


def test_every_setting_of_ours_in_the_table_exists():
    groups = known_groups(find_config_dir())
    for span in {span for ours in OURS for span in re.findall(r"`([^`]+)`", ours)}:
        key, _, value = span.partition("=")
        if key.startswith("mega_agentrl."):
            module, _, name = key.rpartition(".")
            source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
            assert re.search(rf"^(?:class|def) {name}\b", source, re.M), key
        elif key in groups and (value or not is_known(key)):
            assert not value or value in groups[key], span
        elif "." in key or not key.isupper():
            assert is_known(key) or key in known_options() or key in NO_SETTINGS, span


@pytest.mark.parametrize("project", PEER_KEYS)
def test_the_page_lists_the_table(project):
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|$", PAGE, re.M)
    for names in (PEER_KEYS[project], PEER_CLASSES[project]):
        assert set(names.items()) <= set(rows)
