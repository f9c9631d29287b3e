"""User objects are loaded from a module or from a file."""

import sys

import pytest

from mega_agentrl.types.user_code import load_user_object


def test_a_file_and_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it_mine.py").write_text("NUMBER = 3\n")
    file = tmp_path / "mine.py"
    file.write_text("from beside_it_mine import NUMBER\nother = 4\n")
    assert load_user_object(f"{file}:NUMBER", "key", "other") == ("NUMBER", 3)
    assert load_user_object(str(file), "key", "other") == ("other", 4)
    assert load_user_object(f"{file}:nothing", "key", "other") == ("nothing", None)


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "mine.py").write_text(f"value = {number}\n")
    found = [
        load_user_object(f"{tmp_path}/{number}/mine.py", "key", "value")[1] for number in (1, 2)
    ]
    assert found == [1, 2]


def test_a_module():
    assert load_user_object("math:tau", "key", "x")[1] == pytest.approx(6.283185307)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/mine.py", "key: there is no file /nowhere/mine.py"),
        ("no_such_module:x", "key: importing no_such_module raised ModuleNotFoundError"),
    ],
)
def test_what_does_not_exist_is_named(path, message):
    with pytest.raises(ValueError, match=message):
        load_user_object(path, "key", "x")


def test_a_file_that_fails_leaves_no_module_behind(tmp_path):
    file = tmp_path / "failing_mine.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="raised ZeroDivisionError"):
        load_user_object(f"{file}:x", "key", "x")
    assert not [name for name in sys.modules if name.startswith("failing_mine")]
