"""Tables read as plain rows; every way a file can be wrong names the setting and the file."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.data.table import read_rows, without_nulls


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_are_plain_values(tmp_path):
    rows = [{"a": 1, "b": [{"c": "x"}]}, {"a": 2, "b": []}]
    path = write(tmp_path / "t.parquet", rows)
    assert read_rows(path, key="data.train", columns=("a",)) == rows


@pytest.mark.parametrize("name", ["", "absent.parquet"])
def test_a_missing_file(tmp_path, name):
    path = tmp_path / name if name else ""
    with pytest.raises(ValueError, match=r"data\.train=.*no such file"):
        read_rows(path, key="data.train", columns=())


def test_a_file_that_is_no_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("hello, this is not parquet")
    with pytest.raises(ValueError, match=r"data\.train=.*t\.parquet: not a readable parquet"):
        read_rows(path, key="data.train", columns=())


def test_a_missing_column_and_an_empty_table(tmp_path):
    path = write(tmp_path / "t.parquet", [{"a": 1}])
    with pytest.raises(ValueError, match=r"missing column prompt; got \['a'\]"):
        read_rows(path, key="data.train", columns=("a", "prompt"))
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    with pytest.raises(ValueError, match=r"t\.parquet: the table is empty"):
        read_rows(path, key="data.train", columns=("a",))


def test_nulls_that_come_from_other_rows_are_left_out():
    value = {"python": {"create_kwargs": None}, "search": None, "list": [{"x": None}, 1]}
    assert without_nulls(value) == {"python": {}, "list": [{}, 1]}
