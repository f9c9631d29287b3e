"""Unknown keys and options fail with the nearest known name."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.override_keys import (
    check_overrides,
    check_yaml_keys,
    known_groups,
    known_keys,
    known_sections,
    nearest_name,
    parse_command_line,
)
from mega_agentrl.config.paths import find_config_dir


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
    ("name", "expected"),
    [
        ("optim.lrr", "optim.lr"),
        ("data.tarin", "data.train"),
        ("rollout.branch.taau", "rollout.branch.tau"),
        ("optm.clip_low", "algo.clip_low"),
        ("groupsize", "rollout.group_size"),
        ("total_step", "total_steps"),
    ],
)
def test_nearest(name, expected):
    assert nearest_name(name) == expected


@given(st.sampled_from(sorted(known_keys())))
def test_nearest_to_a_known_key_is_itself(key):
    assert nearest_name(key) == key


@given(st.text(max_size=30))
def test_nearest_is_always_a_known_name(name):
    assert nearest_name(name) in {*known_keys(), *known_sections()}


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
        "reward={rubric: {gsm8k: {arpo: 0.5}}}",
    ],
)
def test_known_overrides_pass(folder, override):
    check_overrides([override], folder)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; nearest known is 'optim.lr'"),
        ("+optim.lrr=1", "nearest known is 'optim.lr'"),
        ("~optim.lrr", "nearest known is 'optim.lr'"),
        ("lr=1", "nearest known is 'optim.lr' or 'sft.lr'"),
        ("algorithm=grpo", "nearest known is 'algo'"),
        ("algo=grpoo", "'grpoo' is not an option of group algo; nearest is 'grpo'"),
        ("algo=grpo,arppo", "'arppo' is not an option of group algo; nearest is 'arpo'"),
        ("experiment=[smoke,smok]", "'smok' is not an option of group experiment"),
        ("optim={lrr: 0.1}", "unknown key 'optim.lrr'"),
        ("rollout={branch: {taau: 1}}", "unknown key 'rollout.branch.taau'"),
        ("tool.python=3", "tool.python is a section; set one of its keys: tool.python."),
        ("+reward.rubric.a.arpo.x=1", "unknown key 'reward.rubric.a.arpo.x'"),
        ("optim.lr", "expected key=value"),
        ("=3", "unknown key"),
    ],
)
def test_unknown_overrides_fail(folder, override, hint):
    with pytest.raises(ValueError, match="override") as caught:
        check_overrides(["seed=1", override], folder)
    assert hint in str(caught.value)
    assert override in str(caught.value)


def test_groups_of_a_second_folder_count(folder, tmp_path_factory):
    extra = tmp_path_factory.mktemp("extra")
    (extra / "algo").mkdir()
    (extra / "algo" / "mine.yaml").write_text("")
    with pytest.raises(ValueError, match="mine"):
        check_overrides(["algo=mine"], folder)
    check_overrides(["algo=mine", "experiment=smoke"], folder, extra)


def test_read_command_line_keeps_overrides_only():
    arguments = ["-m", "--cfg", "job", "--config-dir", "my/configs", "seed=1,2", "algo=grpo"]
    assert parse_command_line(arguments) == (["seed=1,2", "algo=grpo"], [Path("my/configs")])
    assert parse_command_line(["--help"]) == ([], [])


def test_the_configurations_of_the_project_name_known_keys():
    check_yaml_keys(find_config_dir())


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("algo/new.yaml", "clip_loww: 0.1\n", "'algo.clip_loww'; nearest known is 'algo.clip_low'"),
        ("experiment/new.yaml", "# @package _global_\nsed: 1\n", "'sed'; nearest known is 'seed'"),
        ("train.yaml", "optim:\n  lrr: 1\n", "'optim.lrr'; nearest known is 'optim.lr'"),
    ],
)
def test_an_unknown_key_in_a_file_fails(folder, name, text, hint):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=r"new\.yaml|train\.yaml") as caught:
        check_yaml_keys(folder)
    assert hint in str(caught.value)


def test_hydras_own_keys_in_a_file_pass(folder):
    (folder / "train.yaml").write_text("hydra:\n  run:\n    dir: x\nseed: 1\n")
    check_yaml_keys(folder)
