"""Tables are read as plain rows; errors name the setting, the file and the row."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.data.table_reader import drop_nulls, read_rows


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_are_plain_values(tmp_path):
    rows = [{"a": 1, "b": [{"c": "x"}]}, {"a": 2, "b": []}]
    path = write(tmp_path / "t.parquet", rows)
    assert read_rows(path, key="data.train", columns=("a",)) == rows


@pytest.mark.parametrize("name", ["", "absent.parquet"])
def test_a_missing_file_is_refused(tmp_path, name):
    path = tmp_path / name if name else ""
    with pytest.raises(ValueError, match=r"data\.train=.*no such file"):
        read_rows(path, key="data.train", columns=())


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("hello, this is not parquet")
    with pytest.raises(ValueError, match=r"data\.train=.*t\.parquet: not a readable parquet"):
        read_rows(path, key="data.train", columns=())


def test_a_missing_column_and_an_empty_table_are_refused(tmp_path):
    path = write(tmp_path / "t.parquet", [{"a": 1}])
    with pytest.raises(ValueError, match=r"missing column prompt; got \['a'\]"):
        read_rows(path, key="data.train", columns=("a", "prompt"))
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    with pytest.raises(ValueError, match=r"t\.parquet: the table is empty"):
        read_rows(path, key="data.train", columns=("a",))


def test_json_lines_compressed_or_not(tmp_path):
    rows = [{"a": 1, "b": "x\u2028y"}, {"a": None, "c": [1]}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n\n"
    (tmp_path / "t.jsonl").write_bytes(lines)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("t.jsonl", "t.jsonl.gz"):
        assert read_rows(tmp_path / name, key="data.train", columns=("a",)) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"a": 1}\n{"a":', r"t\.jsonl row 1: got '\{\"a\":', expected JSON"),
        ("t.jsonl", b'{"a": 1}\n{"b": 1}', r"t\.jsonl row 1: missing column a; got \['b'\]"),
        ("t.jsonl", b"[1]", r"t\.jsonl row 0: got '\[1\]', expected an object"),
        ("t.jsonl", b"\xff", r"t\.jsonl: not a readable JSONL file"),
        ("t.jsonl", b"\n", r"t\.jsonl: the table is empty"),
        pytest.param(
            "t.jsonl.gz",
            gzip.compress(b'{"a": 1}', mtime=0)[:-9],
            r"t\.jsonl\.gz: not a readable JSONL file",
            id="cut off",
        ),
        ("t.jsonl.gz", b'{"a": 1}', r"t\.jsonl\.gz: not a readable JSONL file"),
    ],
)
def test_damaged_json_lines_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.train=.*{message}"):
        read_rows(tmp_path / name, key="data.train", columns=("a",))


def test_drop_nulls():
    value = {"python": {"create_kwargs": None}, "search": None, "list": [{"x": None}, 1]}
    assert drop_nulls(value) == {"python": {}, "list": [{}, 1]}
