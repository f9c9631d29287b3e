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
        ("file:///d/a.parquet", [("/d/a.parquet", 1.0)]),
    ],
)
def test_what_hydra_reads_off_the_command_line(written, meant):
    override = OverridesParser.create().parse_override(f"data.train={written}")
    assert data_files(override.value(), "k") == tuple(DataFile(*one) for one in meant)


def test_what_is_remote():
    assert DataFile("s3://b/a.parquet").is_remote
    assert not data_files("file:///d/a.parquet", "k")[0].is_remote
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
