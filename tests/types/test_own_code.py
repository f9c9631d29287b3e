"""Objects of the user's own are found by module or by file."""

import sys

import pytest

from mega_agentrl.types.own_code import find


def test_a_file_and_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it_mine.py").write_text("NUMBER = 3\n")
    file = tmp_path / "mine.py"
    file.write_text("from beside_it_mine import NUMBER\nother = 4\n")
    assert find(f"{file}:NUMBER", "key", "other") == ("NUMBER", 3)
    assert find(str(file), "key", "other") == ("other", 4)
    assert find(f"{file}:nothing", "key", "other") == ("nothing", None)


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "mine.py").write_text(f"value = {number}\n")
    found = [find(f"{tmp_path}/{number}/mine.py", "key", "value")[1] for number in (1, 2)]
    assert found == [1, 2]


def test_a_module():
    assert find("math:tau", "key", "x")[1] == pytest.approx(6.283185307)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nowhere/mine.py", "key: there is no file /nowhere/mine.py"),
        ("no_such_module:x", "key: importing no_such_module raised ModuleNotFoundError"),
    ],
)
def test_what_is_not_there_is_named(path, said):
    with pytest.raises(ValueError, match=said):
        find(path, "key", "x")


def test_a_file_that_fails_leaves_no_module_behind(tmp_path):
    file = tmp_path / "failing_mine.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="raised ZeroDivisionError"):
        find(f"{file}:x", "key", "x")
    assert not [name for name in sys.modules if name.startswith("failing_mine")]
