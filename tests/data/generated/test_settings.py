"""The stamp holds for the same settings and a complete folder only."""

import pytest

from mega_agentrl.data.generated.settings import (
    STAMP_FILE,
    GeneratedTask,
    TaskSettings,
    is_written,
    remove_stamp,
    write_stamp,
)
from mega_agentrl.errors import InputError

OUTPUT_FILES = GeneratedTask.toolqa.output_files


@pytest.fixture
def folder(tmp_path):
    for name in OUTPUT_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_the_stamp_is_for_its_settings(folder):
    assert not is_written(folder, TaskSettings())
    write_stamp(folder, TaskSettings())
    assert is_written(folder, TaskSettings())
    assert not is_written(folder, TaskSettings(seed=1))
    assert not is_written(folder, TaskSettings(task=GeneratedTask.calls))
    remove_stamp(folder)
    assert not is_written(folder, TaskSettings())


@pytest.mark.parametrize("name", OUTPUT_FILES)
def test_the_stamp_is_invalid_without_one_of_the_files(folder, name):
    write_stamp(folder, TaskSettings())
    (folder / name).unlink()
    assert not is_written(folder, TaskSettings())


def test_a_damaged_stamp_is_no_stamp(folder):
    (folder / STAMP_FILE).write_text("{")
    assert not is_written(folder, TaskSettings())


def test_sizes_must_be_positive():
    with pytest.raises(InputError) as caught:
        TaskSettings(num_train=0)
    assert (caught.value.name, caught.value.got) == ("num_train", 0)
