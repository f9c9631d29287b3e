"""Find the yaml files and name the folders of a sweep."""

import pytest

from mega_agentrl.config.paths import find_config_dir, sweep_dir_name


def make(folder):
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text("seed: 1\n")
    return folder


def test_the_installed_folder_is_preferred_to_that_of_a_checkout(tmp_path):
    # site-packages may hold another project's folder called configs
    checkout = make(tmp_path / "configs")
    assert find_config_dir(tmp_path / "mega_agentrl") == checkout
    installed = make(tmp_path / "mega_agentrl" / "configs")
    assert find_config_dir(tmp_path / "mega_agentrl") == installed


def test_a_folder_without_the_root_file_does_not_count(tmp_path):
    (tmp_path / "configs").mkdir()
    with pytest.raises(ValueError, match=r"train\.yaml"):
        find_config_dir(tmp_path / "mega_agentrl")


def test_the_folder_of_a_sweep_job_has_no_path_of_its_overrides():
    assert sweep_dir_name("algo=grpo,model.path=/models/a/") == "algo=grpo,model.path=a"
    assert sweep_dir_name("") == "defaults"
    assert "/" not in sweep_dir_name("a/b/c=1")


def test_long_names_are_cut_and_stay_different():
    one, other = (sweep_dir_name("seed=1," * 100 + f"optim.lr={lr}") for lr in (1, 2))
    assert one != other
    assert max(len(one), len(other)) <= 80
    assert one == sweep_dir_name("seed=1," * 100 + "optim.lr=1")
