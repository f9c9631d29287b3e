"""User objects are loaded from a file or a module, and choices are built in or the user's."""

import sys

import pytest

from mega_agentrl.config.algorithm_traits import ESTIMATORS, LOSSES
from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.config.user_code import load_user_object, parse_choice
from tests.config.refusals import refused, refused_setting


def load(reference, **options):
    return load_user_object(str(reference), "a.key", "a number", **options)


def test_a_file_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it_mine.py").write_text("NUMBER = 3\n")
    file = tmp_path / "mine.py"
    file.write_text("from beside_it_mine import NUMBER\nother = 4\n")
    assert load(f"{file}:NUMBER", default_name="other") == 3
    assert load(file, default_name="other") == 4
    assert load("mine.py:other", folder=tmp_path) == 4


def test_a_file_is_imported_once(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("first = object()\n")
    assert load(f"{file}:first") is load(f"{tmp_path}/../{tmp_path.name}/mine.py:first")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "mine.py").write_text(f"value = {number}\n")
    assert [load(f"{tmp_path}/{number}/mine.py:value") for number in (1, 2)] == [1, 2]


def test_an_object_is_found_in_a_module_by_colon_dot_or_default():
    assert load("math:tau") == pytest.approx(6.283185307)
    assert load("math.tau") == load("math", default_name="tau") == load("math:tau")


@pytest.mark.parametrize(
    ("text", "error_type", "cause"),
    [
        ("other = 1\n", type(None), "the module has no value, but defines other"),
        ("x = 1\n1 / 0\n", ZeroDivisionError, "mine.py, line 2)"),
        ("import no_such_module\n", ModuleNotFoundError, "'no_such_module' ("),
        ("def value(:\n", SyntaxError, "/mine.py, line 1)"),
        ("import sys\nsys.exit(3)\n", SystemExit, "SystemExit: 3 ("),
        ("import bad_beside\n", ZeroDivisionError, "mine.py, line 1; raised in "),
        ("import bad_syntax_beside\n", SyntaxError, "/bad_syntax_beside.py, line 2)"),
    ],
    ids=["no such name", "error", "import", "syntax", "exit", "other file", "other file's syntax"],
)
def test_what_is_wrong_with_the_users_code_is_the_cause(tmp_path, text, error_type, cause):
    file = tmp_path / "mine.py"
    file.write_text(text)
    (tmp_path / "bad_beside.py").write_text("\n1 / 0\n")
    (tmp_path / "bad_syntax_beside.py").write_text("\ndef value(:\n")
    error = refused(load, f"{file}:value")
    assert (error.key, error.got, error.expected) == ("a.key", f"{file}:value", "a number")
    assert type(error.__cause__) is error_type
    assert cause in error.cause
    is_loaded = str(file) in {getattr(module, "__file__", "") for module in [*sys.modules.values()]}
    assert is_loaded == (error.__cause__ is None)


@pytest.mark.parametrize(
    ("reference", "error_type"),
    [
        ("/nowhere/mine.py:x", FileNotFoundError),
        ("no_such_module:x", ModuleNotFoundError),
        ("no_such_module.x", ModuleNotFoundError),
        ("math:no_such_name", type(None)),
        ("math", type(None)),
        ("math:", type(None)),
    ],
)
def test_a_reference_to_nothing_is_refused(reference, error_type):
    error = refused(load, reference)
    assert (error.key, error.got) == ("a.key", reference)
    assert type(error.__cause__) is error_type


def test_a_choice_is_built_in_or_a_reference(monkeypatch, tmp_path):
    assert parse_choice("aepo", Branching, "rollout.branching") is Branching.aepo
    assert parse_choice("gspo", ["clipped", "gspo"], "algo.loss") == "gspo"
    assert parse_choice("my.losses:loss", ["gspo"], "algo.loss") == "my.losses:loss"
    monkeypatch.chdir(tmp_path)
    config = AlgoConfig(loss="mine.py", advantage="sub/mine.py:one")
    assert config.loss == f"{tmp_path}/mine.py"
    assert config.advantage == f"{tmp_path}/sub/mine.py:one"
    assert config.has_user_loss and config.has_user_advantage
    rollout = RolloutConfig(branching=f"{tmp_path}/mine.py")
    assert rollout.branching == f"{tmp_path}/mine.py" and rollout.has_user_branching
    assert RolloutConfig(branching="aepo").branching is Branching.aepo


@pytest.mark.parametrize(
    ("section", "name", "key", "choices"),
    [
        (AlgoConfig, "loss", "algo.loss", LOSSES.registered()),
        (AlgoConfig, "advantage", "algo.advantage", ESTIMATORS.registered()),
        (RolloutConfig, "branching", "rollout.branching", Branching),
    ],
    ids=["loss", "advantage", "branching"],
)
def test_an_unknown_name_is_refused_with_the_known_ones(section, name, key, choices):
    assert refused_setting(section, **{name: "clippd"}) == (key, "clippd")
    assert all(choice in refused(section, **{name: "clippd"}).expected for choice in choices)
