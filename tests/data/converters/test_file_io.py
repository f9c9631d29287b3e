"""Source files are read in every format; the parquet file is written whole or not at all."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.data.converters.file_io import read_source_rows, write_rl_parquet
from mega_agentrl.errors import InputError

ROWS = [{"a": 1, "b": "x\u2028y"}, {"a": 2, "b": "z"}]


def written(path):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.stem == "list":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n")
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "list.json"])
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = written(tmp_path / name)
    read = read_source_rows([path])
    assert [row.values for row in read] == ROWS
    kind = "line" if name in ("a.jsonl", "a.json") else "row"
    assert [(row.file, row.place) for row in read] == [(str(path), f"{kind} {n}") for n in (1, 2)]


def test_files_follow_each_other_and_one_object_may_fill_a_file(tmp_path):
    one = tmp_path / "one.json"
    one.write_text(json.dumps(ROWS[1], indent=1))
    read = read_source_rows([written(tmp_path / "a.jsonl"), one])
    assert [row.values["a"] for row in read] == [1, 2, 2]
    assert read[2].place == "row 1"


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        pytest.param("a.csv", b"a,b", "", id="suffix"),
        pytest.param("a.jsonl", b"", "", id="empty"),
        pytest.param("a.jsonl", b'{"a": 1}\n\n{"a": ', " line 3", id="cut"),
        pytest.param("a.json", b"[1]", " row 1", id="no_object"),
        pytest.param("a.json", b"\xff\xfe", "", id="encoding"),
        pytest.param("a.json", b"[" * 100_000, "", id="nested"),
        pytest.param("a.jsonl", b"[" * 100_000, " line 1", id="nested_line"),
        pytest.param("a.parquet", b"PAR", "", id="parquet"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, content, place):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_source_rows([path])
    assert caught.value.name.startswith("--input")
    assert f"{path}{place}" in str(caught.value)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet"])
def test_a_missing_file_is_refused(tmp_path, name):
    with pytest.raises(InputError) as caught:
        read_source_rows([tmp_path / name])
    assert (caught.value.name, caught.value.got) == ("--input", str(tmp_path / name))


def test_the_same_rows_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_rl_parquet(ROWS, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert pq.read_table(tmp_path / "a").to_pylist() == ROWS


def test_an_existing_file_is_kept_without_force(tmp_path):
    path = tmp_path / "out.parquet"
    path.write_text("mine")
    with pytest.raises(InputError) as caught:
        write_rl_parquet(ROWS, path)
    assert caught.value.name == str(path)
    assert path.read_text() == "mine"
    write_rl_parquet(ROWS, path, force=True)
    assert pq.read_table(path).num_rows == 2


@pytest.mark.parametrize("rows", [[{"a": 1}, {"a": "x"}], [{"a": {}}], []])
def test_rows_that_fit_no_table_leave_no_file(tmp_path, rows):
    with pytest.raises(InputError) as caught:
        write_rl_parquet(rows, tmp_path / "out.parquet")
    assert caught.value.name == str(tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused(tmp_path):
    path = tmp_path / "no" / "out.parquet"
    with pytest.raises(InputError) as caught:
        write_rl_parquet(ROWS, path)
    assert caught.value.name == str(path)
