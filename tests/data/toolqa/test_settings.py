"""The stamp holds for the same settings and a complete folder only."""

import pytest

from mega_agentrl.data.toolqa.settings import (
    OUTPUT_FILES,
    STAMP_FILE,
    ToolQASettings,
    is_written,
    remove_stamp,
    write_stamp,
)


@pytest.fixture
def folder(tmp_path):
    for name in OUTPUT_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_the_stamp_is_for_its_settings(folder):
    assert not is_written(folder, ToolQASettings())
    write_stamp(folder, ToolQASettings())
    assert is_written(folder, ToolQASettings())
    assert not is_written(folder, ToolQASettings(seed=1))
    remove_stamp(folder)
    assert not is_written(folder, ToolQASettings())


@pytest.mark.parametrize("name", OUTPUT_FILES)
def test_the_stamp_is_invalid_without_one_of_the_files(folder, name):
    write_stamp(folder, ToolQASettings())
    (folder / name).unlink()
    assert not is_written(folder, ToolQASettings())


def test_a_damaged_stamp_is_no_stamp(folder):
    (folder / STAMP_FILE).write_text("{")
    assert not is_written(folder, ToolQASettings())


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="num_train=0"):
        ToolQASettings(num_train=0)
