"""Unknown keys and options fail with the nearest known name."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from mega_agentrl.config.override_keys import (
    check_overrides,
    check_yaml_keys,
    compose_settings,
    known_groups,
    known_keys,
    known_sections,
    parse_command_line,
    register_schema,
    repeated_keys,
)
from mega_agentrl.config.paths import find_config_dir
from tests.config.refusals import refused, refused_input, refused_setting


@dataclass
class Inner:
    size: int = 1


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    name: str = ""


@pytest.fixture
def folder(tmp_path):
    for name in ("algo/grpo", "algo/arpo", "experiment/smoke", "rollout/branch/wide"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "train.yaml").write_text("defaults:\n  - algo: grpo\nseed: 2\n")
    return tmp_path


def test_known_keys_are_the_leaves_with_their_types():
    assert known_keys(Outer) == {"inner.size": int, "name": str}
    assert known_keys()["optim.lr"] is float
    assert "rollout.branch.tau" in known_keys()
    assert "rollout.branch" not in known_keys()


def test_known_sections_are_all_parents():
    assert known_sections(Outer) == {"inner"}
    assert {"rollout", "rollout.branch", "tool.python"} <= known_sections()


def test_known_groups_are_the_folders(folder):
    assert known_groups(folder) == {
        "algo": ["arpo", "grpo"],
        "experiment": ["smoke"],
        "rollout/branch": ["wide"],
    }


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1e-4",
        "+optim.lr=1e-4",
        "++optim.lr=1e-4",
        "~optim.lr",
        "~algo",
        "algo=grpo",
        "algo=grpo,arpo",
        "seed=1,2,3",
        "seed=choice(1,2)",
        "seed=range(1,4)",
        "experiment=smoke",
        "+experiment=smoke",
        "experiment=[smoke]",
        "algo@algo=grpo",
        "rollout/branch=wide",
        "optim={lr: 0.1}",
        "model.path='/a b/c=d'",
        "hydra.run.dir=/tmp/x",
        "hydra/launcher=joblib",
        "rollout.branch.initial_rollouts=null",
        "+reward.rubric.gsm8k.arpo=0.5",
        "algo.loss_options.of_my_own=0.5",
        "reward={rubric: {gsm8k: {arpo: 0.5}}}",
    ],
)
def test_known_overrides_pass(folder, override):
    check_overrides([override], folder)


@pytest.mark.parametrize(
    ("override", "got", "nearest"),
    [
        ("optim.lrr=1", "optim.lrr", "'optim.lr'"),
        ("+optim.lrr=1", "optim.lrr", "'optim.lr'"),
        ("~optim.lrr", "optim.lrr", "'optim.lr'"),
        ("lr=1", "lr", "'optim.lr' or 'sft.lr'"),
        ("data.tarin=1", "data.tarin", "'data.train'"),
        ("optm.kl_coef=1", "optm.kl_coef", "'algo.kl_coef'"),
        ("algo.clip_dual=3", "algo.clip_dual", "'algo.loss_options.clip_dual'"),
        ("algo.loss_options.a.b=1", "algo.loss_options.a.b", "'"),
        ("rollout.branch.taau=1", "rollout.branch.taau", "'rollout.branch.tau'"),
        ("groupsize=1", "groupsize", "'rollout.group_size'"),
        ("total_step=1", "total_step", "'total_steps'"),
        ("algorithm=grpo", "algorithm", "'algo'"),
        ("algo=grpoo", "grpoo", "'grpo'"),
        ("algo=grpo,arppo", "arppo", "'arpo'"),
        ("experiment=[smoke,smok]", "smok", "'smoke'"),
        ("optim={lrr: 0.1}", "optim.lrr", "'optim.lr'"),
        ("rollout={branch: {taau: 1}}", "rollout.branch.taau", "'rollout.branch.tau'"),
        ("+reward.rubric.a.arpo.x=1", "reward.rubric.a.arpo.x", "'"),
        ("zzqq=1", "zzqq", "'"),
        ("=3", "", "'"),
    ],
)
def test_unknown_overrides_are_refused_with_the_nearest_name(folder, override, got, nearest):
    error = refused_input(check_overrides, ["seed=1", override], folder)
    assert (error.name, error.got) == (f"override {override!r}", got)
    assert f"nearest is {nearest}" in error.cause and "is ''" not in error.cause


def test_an_override_without_a_value_and_a_value_of_a_section_are_refused(folder):
    error = refused_input(check_overrides, ["optim.lr"], folder)
    assert (error.name, error.got) == ("override", "optim.lr")
    error = refused_input(check_overrides, ["tool.python=3"], folder)
    assert error.name == "override 'tool.python=3'"
    assert "tool.python.mode" in error.expected


def test_groups_of_a_second_folder_count(folder, tmp_path_factory):
    extra = tmp_path_factory.mktemp("extra")
    (extra / "algo").mkdir()
    (extra / "algo" / "mine.yaml").write_text("")
    assert refused_input(check_overrides, ["algo=mine"], folder).got == "mine"
    check_overrides(["algo=mine", "experiment=smoke"], folder, extra)


def test_a_config_group_has_one_choice(folder):
    check_overrides(["seed=1", "seed=2", "algo=grpo", "algo@algo=grpo"], folder)
    check_overrides(["algo=grpo", "algo={kl_coef: 0.1}", "algo={kl_target: null}"], folder)
    error = refused_input(check_overrides, ["algo=grpo", "seed=1", "algo=arpo"], folder)
    assert error.name == "override 'algo=arpo'"
    assert "'algo=grpo'" in error.got


def test_the_command_line_has_overrides_and_folders():
    arguments = ["-m", "--cfg", "job", "--config-dir", "my/configs", "seed=1,2", "algo=grpo"]
    line = parse_command_line(arguments)
    assert line.overrides == ["seed=1,2", "algo=grpo"]
    assert line.config_dirs == [Path("my/configs")]


@pytest.mark.parametrize(
    ("arguments", "asks_help", "is_sweep", "starts_run"),
    [
        (["seed=1"], False, False, True),
        (["-m", "seed=1,2"], False, True, True),
        (["--help", "optim"], True, False, False),
        (["--cfg", "job"], False, False, False),
        (["--hydra-help"], False, False, False),
        (["--info", "plugins"], False, False, False),
    ],
    ids=["run", "sweep", "help", "configuration", "hydra_help", "info"],
)
def test_the_command_line_says_what_starts(arguments, asks_help, is_sweep, starts_run):
    line = parse_command_line(arguments)
    assert (line.asks_help, line.is_sweep, line.starts_run) == (asks_help, is_sweep, starts_run)


def test_only_options_are_added_without_a_plus():
    overrides = [
        "algo=gspo",
        "algo.loss_options.clip_high=0.3",
        "algo.loss_options.of_my_own=null",
        "~algo.loss_options.clip_low",
        "algo.advantage_options={norm_by_std: false}",
        "rollout.branching_options.height=2",
    ]
    register_schema()
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        composed = compose("train", overrides)
        with pytest.raises(HydraException, match=r"\+reward\.functions\.mine"):
            compose("train", ["reward.functions.mine=a.py:b"])
    options = {"clip_high": 0.3, "of_my_own": None}
    assert composed.algo.loss_options == options
    assert composed.algo.advantage_options == {"norm_by_std": False}
    assert composed.rollout.branching_options == {"height": 2}


def test_the_files_of_configs_set_known_keys():
    check_yaml_keys(find_config_dir())


@pytest.mark.parametrize(
    ("name", "text", "unknown", "nearest"),
    [
        ("algo/new.yaml", "kl_coeff: 0.1\n", "algo.kl_coeff", "algo.kl_coef"),
        (
            "algo/new.yaml",
            "lam: 0.1\n",
            "algo.lam",
            "algo.advantage_options.lam' or 'algo.egpo.lam",
        ),
        ("experiment/new.yaml", "# @package _global_\nsed: 1\n", "sed", "seed"),
        ("train.yaml", "optim:\n  lrr: 1\n", "optim.lrr", "optim.lr"),
    ],
)
def test_an_unknown_key_in_a_file_is_refused(folder, name, text, unknown, nearest):
    (folder / name).write_text(text)
    error = refused_input(check_yaml_keys, folder)
    assert (error.name, error.got) == (str(folder / name), unknown)
    assert error.cause.endswith(f" '{nearest}'")


DAMAGED = {
    "cut": "seed: [",
    "key twice": "seed: 1\noptim: {lr: 1}\nseed: 2\n",
    "list": "- seed: 1\n",
    "digits": "seed: 1" + "0" * 5000,
}
HUGE = "optim:\n  lr: 1" + "0" * 400 + "\n"
"""An integer that OmegaConf cannot convert to a float."""


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_with_its_name(folder, damage):
    path = folder / "train.yaml"
    path.write_text(DAMAGED[damage])
    assert refused_setting(check_yaml_keys, folder) == ("configuration", str(path))


def test_a_huge_integer_in_a_file_is_refused_with_its_key(folder, tmp_path_factory):
    mine = tmp_path_factory.mktemp("configs")
    for place in (folder, mine):
        path = place / "experiment" / "huge.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# @package _global_\n{HUGE}")
    assert refused(check_yaml_keys, folder).key == f"{folder}/experiment/huge.yaml, optim.lr"
    error = refused(check_overrides, ["experiment=huge"], folder, mine)
    assert error.key == f"{mine}/experiment/huge.yaml, optim.lr"


@pytest.mark.parametrize(
    ("override", "key", "got", "expected"),
    [
        ("sft.lr=.nan", "sft.lr", ".nan", "a finite number, at least 0, at most 10"),
        ("sft.lr=", "sft.lr", "", "a finite number, at least 0, at most 10"),
        ("sft.lr=null", "sft.lr", None, "a finite number, at least 0, at most 10"),
        ("total_steps=1e9", "total_steps", 1e9, "a whole number, at least 0"),
        ("optim.betas=[a,b]", "optim.betas[0]", "a", "2 items, each a finite number, at least 0"),
        ("rollout.top_p=[1]", "rollout.top_p", [1], "a finite number, above 0, at most 1"),
        ("algo.kl_target=x", "algo.kl_target", "x", "1000 nats, or null"),
        ("algo.kl_placement=none", "algo.kl_placement", "none", "one of loss, reward"),
        ("deterministic=maybe", "deterministic", "maybe", "true or false"),
        (
            "reward.functions.mine=r.py:f",
            "reward.functions.mine",
            "r.py:f",
            "'+reward.functions.mine=r.py:f'",
        ),
        (
            "reward.rubric.default={arpo:1}",
            "reward.rubric.default",
            {"arpo": 1},
            "a + before the key",
        ),
    ],
)
def test_a_value_of_another_type_or_a_new_entry_without_a_plus_is_refused_with_its_key(
    override, key, got, expected
):
    register_schema()
    error = refused(compose_settings, [override], find_config_dir())
    assert (error.key, error.got) == (key, got)
    assert expected in error.expected


@pytest.mark.parametrize(
    "weights", ["{agent: 1}", "{agent.reward: 1, agent.length: 0.5}"], ids=["whole", "dotted_names"]
)
def test_weights_in_a_file_may_be_whole_numbers_and_names_may_have_dots(tmp_path, weights):
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    path.write_text(f"# @package _global_\nreward: {{rubric: {{default: {weights}}}}}\n")
    register_schema()
    overrides = ["experiment=mine", "model=hf", "model.path=x"]
    check_overrides(overrides, find_config_dir(), tmp_path)
    config = OmegaConf.to_object(compose_settings(overrides, find_config_dir(), tmp_path))
    assert config.reward.rubric == {"default": yaml.safe_load(weights)}


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        (["+reward.rubric.default={mine:1}"], {"default": {"mine": 1.0}}),
        (["reward.rubric.default={accuracy:2}"], {"default": {"accuracy": 2.0}}),
        (["+reward.rubric.default.mine=1"], {"default": {"accuracy": 1.0, "mine": 1.0}}),
        (["+reward.rubric.default={accuracy:2,mine:1}"], {"default": {"accuracy": 2, "mine": 1}}),
        (
            ["+reward.rubric.default={mine:1}", "+reward.rubric.default.arpo=0.5"],
            {"default": {"mine": 1.0, "arpo": 0.5}},
        ),
        (
            ["+reward.rubric.math={mine:1}"],
            {"default": {"accuracy": 1.0}, "math": {"mine": 1.0}},
        ),
        (["+reward.rubric={math:{mine:1}}"], {"math": {"mine": 1.0}}),
    ],
    ids=["whole", "no_plus", "one_weight", "two_weights", "then_one", "other_source", "all"],
)
def test_weights_of_a_source_given_as_a_whole_replace_those_of_the_group(overrides, weights):
    register_schema()
    composed = compose_settings(["reward=accuracy", *overrides], find_config_dir())
    assert composed.reward.rubric == weights


def test_new_weights_beside_those_of_the_group_need_a_plus():
    register_schema()
    overrides = ["reward=accuracy", "reward.rubric.default={mine:1}"]
    error = refused(compose_settings, overrides, find_config_dir())
    assert (error.key, error.got) == ("reward.rubric.default", {"mine": 1})
    assert "+reward.rubric.default={mine:1}" in error.expected


def test_a_weight_that_is_no_number_is_refused_with_its_key():
    register_schema()
    composed = compose_settings(["+reward.rubric.default={arpo:x}"], find_config_dir())
    error = refused(OmegaConf.to_object, composed)
    assert (error.key, error.got) == ("reward.rubric.default.arpo", "x")
    assert "a finite number" in error.expected


def test_arguments_of_the_agent_need_no_plus_at_any_depth():
    register_schema()
    overrides = ["rollout.agent._target_=my_agent.py:Agent", "rollout.agent.make.game=chess"]
    check_overrides(overrides, find_config_dir())
    agent = compose_settings(overrides, find_config_dir()).rollout.agent
    assert agent == {"_target_": "my_agent.py:Agent", "make": {"game": "chess"}}


def test_fields_of_the_libraries_need_no_plus_at_any_depth():
    register_schema()
    overrides = [
        "model.megatron.moe_permute_fusion=true",
        "optim.megatron.adam_eps=1e-6",
        "engine.vllm.compilation_config.cudagraph_mode=FULL",
    ]
    check_overrides(overrides, find_config_dir())
    config = OmegaConf.to_object(compose_settings(overrides, find_config_dir()))
    assert config.model.megatron == {"moe_permute_fusion": True}
    assert config.optim.megatron == {"adam_eps": 1e-6}
    assert config.engine.vllm == {"compilation_config": {"cudagraph_mode": "FULL"}}


def test_a_value_of_another_type_in_a_file_is_refused_with_key_and_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nsft: {lr: fast}\n")
    register_schema()
    error = refused(compose_settings, ["experiment=mine"], find_config_dir(), tmp_path)
    assert (error.key, error.got) == ("sft.lr", "fast") and "experiment/mine" in error.cause


def test_the_last_value_of_a_key_holds_and_is_reported():
    overrides = ["seed=1", "algo=grpo", "+optim.lr=1e-4", "seed=2", "seed=2", "optim.lr=1e-5"]
    assert repeated_keys(overrides) == [
        "seed is given twice: seed=2 holds, not seed=1",
        "optim.lr is given twice: optim.lr=1e-5 holds, not +optim.lr=1e-4",
    ]
    register_schema()
    assert compose_settings(["seed=1", "seed=2"], find_config_dir()).seed == 2


def test_keys_of_hydra_in_a_file_pass(folder):
    (folder / "train.yaml").write_text("hydra:\n  run:\n    dir: x\nseed: 1\n")
    check_yaml_keys(folder)
