"""Damaged data files are read or refused with their name, whatever the damage is."""

import copy
import datetime
import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.data.sft_dataset import read_conversations
from mega_agentrl.errors import InputError

NUM_FILES = 300
KEY = "data.train"


def good_rows():
    return [
        {
            "prompt": [{"role": "user", "content": f"Question {number}: " + "words " * 9}],
            "data_source": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {
                "index": number,
                "tools_kwargs": {"python": {"create_kwargs": {"size": number}}},
            },
        }
        for number in range(20)
    ]


def to_parquet(rows, path, compression):
    pq.write_table(pa.Table.from_pylist(rows), path, compression=compression)
    return path.read_bytes()


def to_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def flipped(content, rng):
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 3, 30])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncated(content, rng):
    return content[: rng.randrange(len(content))]


def cut_out(content, rng):
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randrange(1, 200) :]


def zeroed(content, rng):
    start = rng.randrange(len(content))
    size = min(rng.randrange(1, 200), len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def doubled(content, rng):
    start = rng.randrange(len(content))
    return content[:start] + content[start : start + 300] * 2 + content[start + 300 :]


BYTE_DAMAGES = (flipped, truncated, cut_out, zeroed, doubled)


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


def wrong_cell(rng):
    """Return a value that some cell should not have."""
    day = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
    values = [
        None,
        True,
        -1,
        2.5,
        "",
        "text",
        [],
        [1],
        [[]],
        {},
        {"a": 1},
        nested(40),
        b"\xff",
        day,
    ]
    return rng.choice(values)


def with_wrong_cells(rows, rng):
    """Put a wrong value into a cell, or into a struct within it, of one row or of all."""
    rows = copy.deepcopy(rows)
    column = rng.choice(list(rows[0]))
    inner = rng.choice([None, "tools_kwargs", "ground_truth", "index"])
    value = wrong_cell(rng)
    for row in rows if rng.random() < 0.5 else [rng.choice(rows)]:
        if inner is not None and isinstance(row[column], dict):
            row[column][inner] = value
        else:
            row[column] = value
    return rows


def damaged_jsonl(rng):
    content = to_jsonl(good_rows())
    kind = rng.choice([*BYTE_DAMAGES, "cells", "nested", "surrogate", "encoding"])
    if callable(kind):
        return kind(content, rng)
    if kind == "cells":
        rows = with_wrong_cells(good_rows(), rng)
        return "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
    if kind == "nested":
        text = rng.choice(["[", '{"a":']) * rng.choice([70, 900, 200_000])
        return content + f'{{"prompt": {text}\n'.encode()
    if kind == "surrogate":
        return content.replace(b"Question 7", b"Question \\ud8%02x" % rng.randrange(100), 1)
    return content.decode().encode(rng.choice(["utf-16", "utf-32", "cp037"]))


def damaged_gzip(rng):
    if rng.random() < 0.5:
        return gzip.compress(damaged_jsonl(rng), mtime=0)
    return rng.choice(BYTE_DAMAGES)(gzip.compress(to_jsonl(good_rows()), mtime=0), rng)


def damaged_parquet(rng, path):
    compression = rng.choice(["none", "snappy", "gzip", "zstd"])
    kind = rng.choice([*BYTE_DAMAGES, "cells", "date"])
    if callable(kind):
        return kind(to_parquet(good_rows(), path, compression), rng)
    if kind == "date":
        table = pa.Table.from_pylist(good_rows())
        far = pa.array([rng.randrange(2**55, 2**62)] * 20, pa.int64())
        unit = rng.choice(["ms", "us"])
        table = table.append_column("when", far.cast(pa.timestamp(unit), safe=False))
        pq.write_table(table, path)
        return path.read_bytes()
    try:
        return to_parquet(with_wrong_cells(good_rows(), rng), path, compression)
    except (pa.ArrowException, TypeError, ValueError):  # the rows have no common type
        return to_parquet([{"prompt": rng.random()}], path, compression)


def write_damaged(path, rng):
    if path.name.endswith(".parquet"):
        content = damaged_parquet(rng, path)
    else:
        content = damaged_gzip(rng) if path.suffix == ".gz" else damaged_jsonl(rng)
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
def test_damaged_files_are_read_or_refused_with_their_name(tmp_path, suffix):
    num_refused = 0
    for number in range(NUM_FILES // 3):
        path = tmp_path / f"file{number}{suffix}"
        write_damaged(path, random.Random(f"{suffix} {number}"))
        try:
            prompts = read_prompts([DataFile(str(path))], DataConfig(), key=KEY)
        except ValueError as error:
            num_refused += 1
            assert str(error).startswith(KEY) and str(path) in str(error), number
            assert len(str(error)) < 5000, number
        else:
            assert all(str(path) in prompt.location for prompt in prompts), number
    assert num_refused > NUM_FILES // 6


def test_undamaged_files_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    to_parquet(good_rows(), path, "zstd")
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(good_rows()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(to_jsonl(good_rows())))
    read = [
        [
            one.prompt
            for one in read_prompts([DataFile(str(tmp_path / name))], DataConfig(), key=KEY)
        ]
        for name in ("a.parquet", "a.jsonl", "a.jsonl.gz")
    ]
    assert read[0] == read[1] == read[2] and len(read[0]) == 20


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_damaged_demonstrations_are_refused_with_their_name(tmp_path, suffix):
    for number in range(20):
        path = tmp_path / f"file{number}{suffix}"
        write_damaged(path, random.Random(f"sft {suffix} {number}"))
        with pytest.raises(InputError) as caught:  # no column messages
            read_conversations(path)
        error = caught.value
        assert error.name.startswith("sft.train_data")
        assert str(path) in f"{error.name} {error.got}"
