"""Files and their weights, as they are written on a command line."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.data_files import DataFile, data_files


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a.parquet", [("a.parquet", 1.0)]),
        ("[a.parquet,b.jsonl@0.5]", [("a.parquet", 1.0), ("b.jsonl", 0.5)]),
        ("/d/a.jsonl.gz@2", [("/d/a.jsonl.gz", 2.0)]),
        ("hf://datasets/me/set@main/c.parquet", [("hf://datasets/me/set@main/c.parquet", 1.0)]),
        ("s3://bucket/c.parquet@.25", [("s3://bucket/c.parquet", 0.25)]),
        ("v@2@1", [("v@2", 1.0)]),
        ("file:///d/a.parquet@2", [("file:///d/a.parquet", 2.0)]),
    ],
)
def test_what_hydra_reads_off_the_command_line(written, meant):
    override = OverridesParser.create().parse_override(f"data.train={written}")
    assert data_files(override.value(), "k") == tuple(DataFile(*one) for one in meant)


@pytest.mark.parametrize(
    ("path", "is_copied", "local_path"),
    [
        ("d/a.parquet", False, "d/a.parquet"),
        ("file:///d/a.parquet", True, "/d/a.parquet"),
        ("local://d/a.parquet", True, "d/a.parquet"),
        ("s3://b/a.parquet", True, None),
        ("file+s3://b/a.parquet", True, None),
    ],
)
def test_what_is_copied_and_what_is_of_this_machine(path, is_copied, local_path):
    (file,) = data_files(path, "k")
    assert (file.is_copied, file.local_path) == (is_copied, local_path)


def test_nothing_is_no_file():
    assert data_files("", "k") == ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, "expected a path or a list"),
        ({"a.parquet": 2}, "expected a path or a list"),
        (["a", 5], "expected a path or a list"),
        (["a", ""], "got the entry ''"),
        ("a@0", "a weight above 0"),
        (["a", "a@2"], "a occurs twice"),
        (["/a", "file:///a"], "/a occurs twice"),
    ],
)
def test_anything_else_is_refused(value, expected):
    with pytest.raises(ValueError, match=expected):
        data_files(value, "data.train")


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,9}\.jsonl", fullmatch=True), st.integers(1, 99)),
        min_size=1,
        unique_by=lambda one: one[0],
    )
)
def test_what_is_written_is_read_back(entries):
    files = data_files([f"{path}@{weight / 10}" for path, weight in entries], "k")
    assert [(file.path, file.weight) for file in files] == [(p, w / 10) for p, w in entries]
