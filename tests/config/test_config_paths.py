"""Find the yaml files of `configs/`."""

import pytest

from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.errors import InputError


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
    with pytest.raises(InputError) as caught:
        find_config_dir(tmp_path / "mega_agentrl")
    assert caught.value.name == "configuration file train.yaml"
