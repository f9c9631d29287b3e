"""Where the yaml files are found."""

import pytest

from mega_agentrl.config.location import config_folder


def make(folder):
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text("seed: 1\n")
    return folder


def test_this_checkout_has_one():
    assert (config_folder() / "train.yaml").is_file()


def test_beside_the_package_in_a_checkout(tmp_path):
    expected = make(tmp_path / "configs")
    assert config_folder(tmp_path / "mega_agentrl") == expected


def test_the_installed_copy_wins(tmp_path):
    # site-packages may hold another project's folder called configs
    make(tmp_path / "configs")
    expected = make(tmp_path / "mega_agentrl" / "configs")
    assert config_folder(tmp_path / "mega_agentrl") == expected


def test_a_folder_without_the_root_file_does_not_count(tmp_path):
    (tmp_path / "configs").mkdir()
    with pytest.raises(ValueError, match=r"train\.yaml is in neither .*configs"):
        config_folder(tmp_path / "mega_agentrl")
