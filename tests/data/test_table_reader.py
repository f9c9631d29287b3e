"""Tables are read as plain rows; errors name the setting, the file and the row."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data import table_reader
from mega_agentrl.data.table_reader import drop_nulls, read_rows
from mega_agentrl.errors import InputError
from tests.config.refusals import refused, refused_setting


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_are_plain_values(tmp_path):
    rows = [{"a": 1, "b": [{"c": "x"}]}, {"a": 2, "b": []}]
    path = write(tmp_path / "t.parquet", rows)
    assert [row.values for row in read(path)] == rows


def read(path):
    return read_rows(path, key="data.train", columns=("a",))


@pytest.mark.parametrize("name", ["", "absent.parquet", "x" * 300, "nul\0"])
def test_a_missing_file_is_refused(tmp_path, name):
    path = tmp_path / name if name else ""
    assert refused_setting(read, path) == ("data.train", str(path))


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("hello, this is not parquet")
    assert refused_setting(read, path) == ("data.train", str(path))


def test_a_parquet_file_with_a_page_cut_out_is_refused(tmp_path):
    rows = [{"a": "".join(chr(97 + (i * j) % 26) for j in range(50))} for i in range(500)]
    path = write(tmp_path / "t.parquet", rows)
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(len(content) // 2) + content[100 + len(content) // 2 :])
    error = refused(read, path)
    assert str(path) in str(error) and error.key.startswith("data.train")


def test_a_date_beyond_those_of_python_is_named_by_column_and_row(tmp_path):
    path = tmp_path / "t.parquet"
    dates = pa.array([0, 2**60, 1], pa.int64()).cast(pa.timestamp("ms"), safe=False)
    pq.write_table(pa.table({"a": [1, 2, 3], "when": dates}), path)
    assert refused_setting(read, path) == (f"data.train={path} row 2, column", "when")


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    assert refused_setting(read, path) == ("data.train", str(path))


def test_a_missing_column_and_an_empty_table_are_refused(tmp_path):
    path = write(tmp_path / "t.parquet", [{"a": 1}])
    with pytest.raises(InputError) as caught:
        read_rows(path, key="data.train", columns=("a", "prompt"))
    assert (caught.value.name, caught.value.got) == (f"data.train={path}", ["a"])
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    with pytest.raises(ConfigError) as caught:
        read_rows(path, key="data.train", columns=("a",))
    assert (caught.value.key, caught.value.got) == ("data.train", str(path))


def test_json_lines_are_read_compressed_or_not(tmp_path):
    rows = [{"a": 1, "b": "x\u2028y"}, {"a": None, "c": [1]}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n\n"
    (tmp_path / "t.jsonl").write_bytes(lines)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("t.jsonl", "t.jsonl.gz"):
        assert [row.values for row in read(tmp_path / name)] == rows


NESTED = b'{"a": ' + b"[" * 100_000
DAMAGED_LINES = {
    "cut line": ("t.jsonl", b'{"a": 1}\n{"a":', " line 2"),
    "after blank lines": ("t.jsonl", b'\n\n{"a": 1}\n \n{"a":', " line 5"),
    "no object": ("t.jsonl", b"[1]", " line 1"),
    "nested beyond the stack": ("t.jsonl", NESTED, " line 1"),
    "nested too deeply": ("t.jsonl", b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}", " line 1"),
    "half a surrogate pair": ("t.jsonl", b'{"a": "\\ud800"}', " line 1"),
    "number of 5000 digits": ("t.jsonl", b'{"a": ' + b"1" * 5000 + b"}", " line 1"),
    "not utf-8": ("t.jsonl", b"\xff", ""),
    "utf-16": ("t.jsonl", '{"a": 1}'.encode("utf-16"), ""),
    "empty": ("t.jsonl", b"\n", ""),
    "gzip cut off": ("t.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], ""),
    "gzip with a wrong checksum": ("t.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-8] + bytes(8), ""),
    "not gzip": ("t.jsonl.gz", b'{"a": 1}', ""),
}


@pytest.mark.parametrize("damage", DAMAGED_LINES)
def test_damaged_json_lines_are_refused(tmp_path, damage):
    name, content, row = DAMAGED_LINES[damage]
    path = tmp_path / name
    path.write_bytes(content)
    error = refused(read, path)
    if row:
        assert error.key == f"data.train={path}{row}"
    else:
        assert (error.key, error.got) == ("data.train", str(path))


def test_a_row_without_a_column_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"b": 1}')
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.name.endswith(f"{path} line 3")
    assert caught.value.got == ["b"]


def test_nulls_are_dropped_from_objects_at_any_depth():
    value = {"python": {"create_kwargs": None}, "search": None, "list": [{"x": None}, 1]}
    assert drop_nulls(value) == {"python": {}, "list": [{}, 1]}


def test_a_compressed_file_that_expands_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(table_reader, "MIN_EXPANDED_BYTES", 1 << 20)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}' + b" " * (3 << 20)))
    error = refused(read, path)
    assert (error.key, error.got) == ("data.train", str(path))
    assert "compressed" in error.cause
    path.write_bytes(gzip.compress(b'{"a": 1}' + b" " * (1 << 19)))
    assert [row.values for row in read(path)] == [{"a": 1}]


def test_a_parquet_file_that_claims_too_many_values_is_refused(tmp_path, monkeypatch):
    """A million nulls take 300 bytes; the footer says how many there are before one is made."""
    monkeypatch.setattr(table_reader, "MAX_VALUES", 1000)
    monkeypatch.setattr(pq, "read_table", lambda *_, **__: pytest.fail("it was read"))
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": pa.nulls(501, pa.int8()), "b": pa.nulls(501, pa.int8())}), path)
    error = refused(read, path)
    assert (error.key, error.got) == ("data.train", str(path))
    assert "501 rows of 2 columns" in error.cause


@pytest.mark.parametrize("depth", [65, 2000])
def test_a_parquet_file_nested_too_deeply_is_refused(tmp_path, depth):
    array = pa.array([1])
    for _ in range(depth):
        array = pa.StructArray.from_arrays([array], ["a"])
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": array}), path)
    error = refused(read, path)
    assert str(path) in f"{error.key}{error.got}"
