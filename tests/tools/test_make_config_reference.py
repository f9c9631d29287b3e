"""The reference of the settings: every leaf is in it, and the page that is kept is current."""

import re
from enum import StrEnum

from mega_agentrl.config.override_keys import known_keys
from tools.make_config_reference import (
    dotted_keys,
    format_file_names,
    format_value,
    main,
    reference,
    type_name,
)


class Colour(StrEnum):
    red = "red"
    blue = "blue"


def test_every_setting_has_one_row():
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|", reference(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(known_keys())


def test_the_page_that_is_kept_is_current(capsys):
    code = main(["--check"])
    assert code == 0, capsys.readouterr().err


def test_an_outdated_page_is_named_with_what_differs(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert main(["--out", str(page)]) == 0
    assert main(["--out", str(page), "--check"]) == 0
    page.write_text(page.read_text().replace("`optim.lr`", "`optim.rate`"))
    assert main(["--out", str(page), "--check"]) == 1
    said = capsys.readouterr().err
    assert "+| `optim.lr` |" in said and "is not current" in said


def test_types_and_values_read_as_on_the_command_line():
    assert type_name(Colour) == "`red`, `blue`"
    assert type_name(int | None) == "int or none"
    assert type_name(list[str]) == "list of str"
    assert type_name(dict[str, dict[str, float]]) == "names with names with float"
    assert [format_value(value) for value in (True, None, "", 1e-6, Colour.red, [1, 2])] == [
        "true",
        "null",
        '""',
        "1e-06",
        "red",
        "[1, 2]",
    ]
    assert format_value([Colour.red, Colour.blue]) == "[red, blue]"
    assert format_value(["<think>"]) == "['<think>']"


def test_no_default_is_shown_as_python_writes_a_choice():
    assert "| `[tensorboard]` |" in reference()
    assert not re.search(r"<\w+\.\w+: ", reference())


def test_files_that_set_a_key():
    tree = {"defaults": ["x"], "seed": 2, "optim": {"lr": 1, "betas": [1, 2]}}
    assert list(dotted_keys(tree)) == ["seed", "optim.lr", "optim.betas", "optim"]
    files = ["algo/grpo", "experiment/smoke", "experiment/smoke_ci"]
    assert format_file_names(files) == ["`algo/grpo`", "2 experiments"]
    assert format_file_names(files[1:2]) == ["1 experiment"]
