"""Errors of readers name setting and file; values of files have a bounded size."""

import json
import os
import zlib

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import MAX_DEPTH, parse_json, read_json, read_yaml, reading
from tests.config.refusals import refused, refused_setting

KEY = "tool.user_tools_file"


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "error",
    [OSError("x"), RecursionError("x"), OverflowError("x"), zlib.error("x"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_any_error_names_setting_and_file(error):
    with pytest.raises(ConfigError) as caught, reading("data.train", "a.parquet", "a table"):
        raise error
    found = caught.value
    assert (found.key, found.got, found.expected) == ("data.train", "a.parquet", "a table")
    assert found.__cause__ is error and type(error).__name__ in found.cause


def test_an_error_of_a_setting_and_an_interruption_are_kept():
    with pytest.raises(ConfigError) as caught, reading("data.train", "a", "a table"):
        raise ConfigError("optim.lr", -1, "above 0")
    assert caught.value.key == "optim.lr"
    with pytest.raises(KeyboardInterrupt), reading("data.train", "a", "a table"):
        raise KeyboardInterrupt


def test_json_has_a_bounded_depth_and_plain_texts():
    assert parse_json(nested(MAX_DEPTH - 1)) == json.loads(nested(MAX_DEPTH - 1))
    wide = "[" + ",".join(["{}"] * 1000) + "]"
    assert len(parse_json(wide)) == 1000
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "\U0001f600 \\ud800"
    for text in (nested(MAX_DEPTH + 1), nested(100_000), '"\\ud800"', '{"\\uDfff": 1}', "", "{"):
        with pytest.raises(ValueError):
            parse_json(text)


def test_json_files_hold_an_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path, KEY, "an object") == {"a": 1}
    for content in (b"[1]", b"", b"\xff", b'{"a": ', nested(100_000).encode()):
        path.write_bytes(content)
        assert refused_setting(read_json, path, KEY, "an object") == (KEY, str(path))


def aliases(depth):
    """Return yaml whose value has 10 ** depth members, of which few are in memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        nested(2000),
        aliases(9),
        "a: 2001-99-99",
        "a: &x [*x]",
        "? [a]\n: 1",
        "!!python/name:a",
        "- class_name: a\n  timeout_s: 1\n  class_name: b",
        "[{a: 1, a: 2}]",
    ],
    ids=["cut", "nested", "aliases", "date", "cycle", "key", "tag", "key twice", "in a line"],
)
def test_yaml_files_are_refused_with_their_name(tmp_path, text):
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    error = refused(read_yaml, path, KEY, "a list")
    assert (error.key, error.got) == (KEY, str(path))


def test_yaml_with_aliases_and_merged_keys_is_read(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text("- &a {x: [1, 2.5, null]}\n- *a\n")
    assert read_yaml(path, KEY, "a list") == [{"x": [1, 2.5, None]}] * 2
    path.write_text("- &a {x: 1, y: 2}\n- &b {<<: *a, x: 3}\n- {<<: *b, y: 4}\n- {1: a, '1': b}\n")
    one, two, three, four = read_yaml(path, KEY, "a list")
    assert (one, two, three) == ({"x": 1, "y": 2}, {"x": 3, "y": 2}, {"x": 3, "y": 4})
    assert four == {1: "a", "1": "b"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_of_another_user_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    assert refused_setting(read_json, path, KEY, "an object") == (KEY, str(path))
