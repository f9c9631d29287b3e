"""File lists with weights, as written on a command line."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mega_agentrl.config.sections.data import DataConfig, DataFile, parse_data_files
from tests.config.refusals import refused, refused_setting


def test_a_list_of_files_survives_the_schema():
    node = OmegaConf.structured(DataConfig)
    node.train = ["a.parquet", "b.jsonl@0.5"]
    config = OmegaConf.to_object(node)
    assert config.train == ["a.parquet", "b.jsonl@0.5"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.parquet", [("a.parquet", 1.0)]),
        ("[a.parquet,b.jsonl@0.5]", [("a.parquet", 1.0), ("b.jsonl", 0.5)]),
        ("/d/a.jsonl.gz@2", [("/d/a.jsonl.gz", 2.0)]),
        ("hf://datasets/me/set@main/c.parquet", [("hf://datasets/me/set@main/c.parquet", 1.0)]),
        ("s3://bucket/c.parquet@.25", [("s3://bucket/c.parquet", 0.25)]),
        ("v@2@1", [("v@2", 1.0)]),
        ("''", []),
        ("file:///d/a.parquet@2", [("file:///d/a.parquet", 2.0)]),
    ],
)
def test_values_parsed_by_hydra_become_files_with_weights(text, expected):
    override = OverridesParser.create().parse_override(f"data.train={text}")
    assert parse_data_files(override.value(), "k") == tuple(DataFile(*one) for one in expected)


@pytest.mark.parametrize(
    ("path", "needs_copy", "local_path"),
    [
        ("d/a.parquet", False, "d/a.parquet"),
        ("file:///d/a.parquet", True, "/d/a.parquet"),
        ("local://d/a.parquet", True, "d/a.parquet"),
        ("s3://b/a.parquet", True, None),
        ("file+s3://b/a.parquet", True, None),
    ],
)
def test_remote_files_are_copied_and_local_paths_are_not(path, needs_copy, local_path):
    (file,) = parse_data_files(path, "k")
    assert (file.needs_copy, file.local_path) == (needs_copy, local_path)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (5, 5),
        ({"a.parquet": 2}, {"a.parquet": 2}),
        (["a", 5], ["a", 5]),
        (["a", ""], ""),
        ("a@0", "a@0"),
        (["a", "a@2"], ["a", "a@2"]),
        (["/a", "file:///a"], ["/a", "file:///a"]),
    ],
)
def test_invalid_entries_are_refused(value, got):
    assert refused_setting(parse_data_files, value, "data.train") == ("data.train", got)


def test_the_file_that_is_listed_twice_is_named():
    assert "/a occurs twice" in refused(parse_data_files, ["/a", "file:///a"], "k").expected


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,9}\.jsonl", fullmatch=True), st.integers(1, 99)),
        min_size=1,
        unique_by=lambda one: one[0],
    )
)
def test_formatted_entries_parse_back(entries):
    files = parse_data_files([f"{path}@{weight / 10}" for path, weight in entries], "k")
    assert [(file.path, file.weight) for file in files] == [(p, w / 10) for p, w in entries]
