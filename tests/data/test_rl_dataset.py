"""Rows become prompts; the error of a bad row names setting, file, row and column."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import Truncation
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import (
    load_prompts,
    num_generation_prompt_tokens,
    truncate_tokens,
)
from mega_agentrl.errors import InputError
from tests.config.refusals import refused


class WordCodec:
    """One id per word; rendered tools cost 100 each; generation prompts, where wanted, two."""

    generation_prompt_ids = ()

    def apply_chat_template(self, messages, tools=None, *, add_generation_prompt=True):
        words = " ".join(message["content"] for message in messages).split()
        ids = [len(word) for word in words] + [100] * len(tools or [])
        return ids + list(self.generation_prompt_ids) * add_generation_prompt


def row(text="one two", **changes):
    base = {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "s",
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"index": 5, "tools_kwargs": {"python": {"create_kwargs": {"k": 1}}}},
    }
    return {**base, **changes}


def load(tmp_path, rows, **options):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return load_files([DataFile(str(path))], **options)


def load_files(files, schemas=None, codec=None, keep_repeats=False, **options):
    config = DataConfig(**({"max_prompt_tokens": 3} | options))
    return load_prompts(
        files,
        codec or WordCodec(),
        config,
        key="data.train",
        tool_schemas=schemas,
        keep_repeats=keep_repeats,
    )


def test_a_row_becomes_a_prompt(tmp_path):
    (prompt,) = load(tmp_path, [row()]).prompts
    assert (prompt.prompt_id, prompt.data_source) == ("s/5", "s")
    assert prompt.messages == ({"role": "user", "content": "one two"},)
    assert prompt.ground_truth == "1"
    assert prompt.token_ids == (3, 3)
    assert prompt.tools_kwargs == {"python": {"create_kwargs": {"k": 1}}}
    assert prompt.extra_info == {"index": 5}


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param("34", id="text"),
        pytest.param(34, id="integer"),
        pytest.param(2.5, id="fraction"),
        pytest.param(["a", "b"], id="list"),
        pytest.param({"target": ["Paris", "City of Paris"]}, id="search_r1"),
        pytest.param({"tests": ["assert f(1) == 2"], "entry": None}, id="object_of_ones_own"),
        pytest.param(None, id="null"),
    ],
)
def test_a_prompt_has_the_ground_truth_of_its_row_as_it_is(tmp_path, truth):
    cell = {"style": "rule", "ground_truth": truth}
    assert load(tmp_path, [row(reward_model=cell)]).prompts[0].ground_truth == truth


def test_a_row_without_a_ground_truth_has_none(tmp_path):
    for cell in (None, {"style": "model"}):
        assert load(tmp_path, [row(reward_model=cell)]).prompts[0].ground_truth is None


def test_a_mixed_list_of_a_jsonl_file_keeps_its_types(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [row(reward_model={"ground_truth": ["1", 2]})])
    (prompt,) = load_files([DataFile(str(lines))]).prompts
    assert prompt.ground_truth == ["1", 2]


def test_arrays_and_decimals_of_a_table_become_lists_and_numbers(tmp_path, monkeypatch):
    values = plain(
        "a",
        reward_model={"ground_truth": np.array(["x", np.int64(3)], dtype=object)},
        prompt=np.array([{"role": "user", "content": "a"}], dtype=object),
        extra_info={"scores": np.array([1.5, 2.5]), "price": Decimal("2.50"), "index": np.int64(4)},
    )

    class PandasRows(Rows):
        def __getitem__(self, index):
            return values

    monkeypatch.setattr("mega_agentrl.data.rl_dataset.load_dataset_class", lambda name: PandasRows)
    (tmp_path / "words").write_text("aa")
    (prompt,) = load_files([DataFile(str(tmp_path / "words"))], dataset_class="my:Rows").prompts
    assert prompt.prompt_id == "s/4"
    assert prompt.ground_truth == ["x", 3]
    assert prompt.extra_info == {"scores": [1.5, 2.5], "price": 2.5, "index": 4}


def test_a_ground_truth_that_is_no_json_value_is_refused(tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path, [row(reward_model={"ground_truth": float("nan")})])
    assert caught.value.name.endswith("row 1, column reward_model, ground_truth")


def test_a_row_has_its_own_tools_although_parquet_merges_the_structs(tmp_path):
    other = {"index": 6, "tools_kwargs": {"search": {"create_kwargs": {"j": 2}}}}
    first, second = load(tmp_path, [row(), row(extra_info=other)]).prompts
    assert set(first.tools_kwargs) == {"python"}
    assert second.tools_kwargs == {"search": {"create_kwargs": {"j": 2}}}


def test_without_extra_info_the_row_number_is_the_index(tmp_path):
    rows = [row(), row(), row()]
    for plain in rows:
        del plain["extra_info"]
    found = load(tmp_path, rows).prompts
    assert [prompt.prompt_id for prompt in found] == ["s/0", "s/1", "s/2"]
    assert found[0].tools_kwargs == {}


def test_schemas_of_the_prompts_tools_reach_the_template(tmp_path):
    schemas = {"python": {"name": "python"}, "search": {"name": "search"}}
    (prompt,) = load(tmp_path, [row()], schemas=schemas).prompts
    assert prompt.token_ids == (3, 3, 100)


def test_without_a_choice_the_template_gets_all_schemas(tmp_path):
    schemas = {"python": {"name": "python"}, "search": {"name": "search"}}
    everything, one = numbered("a", "b")
    one["extra_info"]["tools_kwargs"] = {"search": {"create_kwargs": {"k": 1}}}
    first, second = load(tmp_path, [everything, one], schemas=schemas).prompts
    assert first.token_ids == (1, 100, 100) and len(first.tool_schemas) == 2
    assert second.token_ids == (1, 100) and second.tool_schemas == ({"name": "search"},)
    assert load(tmp_path, [row()]).prompts[0].tool_schemas == ()


def test_schemas_of_the_row_replace_those_of_the_runs_tools(tmp_path):
    own = row("one", tools=json.dumps([{"name": "book"}, {"name": "cancel"}]))
    (prompt,) = load(tmp_path, [own], schemas={"python": {"name": "python"}}).prompts
    assert prompt.tool_schemas == ({"name": "book"}, {"name": "cancel"})
    assert prompt.token_ids == (3, 100, 100)


@pytest.mark.parametrize("cell", ["[", '{"name": "book"}', '["book"]'])
def test_tools_that_are_no_list_of_schemas_are_refused(tmp_path, cell):
    with pytest.raises(InputError) as caught:
        load(tmp_path, [row(tools=cell)])
    assert caught.value.name.endswith("row 1, column tools")
    assert caught.value.got == cell


def test_missing_tools_kwargs_are_one_line_with_a_count_where_they_are_needed(tmp_path, caplog):
    """The 10,000 rows of ARPO's train_10k.parquet have this form."""
    rows = numbered(*"abcdef")
    for each, need in zip(rows, (None, False, True, True, True, True), strict=True):
        each["extra_info"]["need_tools_kwargs"] = need
    rows[5]["extra_info"]["tools_kwargs"] = {"python": {"create_kwargs": {"k": 1}}}
    load(tmp_path, rows)
    (record,) = caplog.records
    assert record.args == ("data.train", 3, f"data.train={tmp_path}/train.parquet row 3")


def numbered(*texts):
    return [row(text, extra_info={"index": index}) for index, text in enumerate(texts)]


def test_overlong_prompts_are_an_error_that_counts_them(tmp_path):
    rows = numbered("a b c", "a b c d", "a b c d e")
    error = refused(load, tmp_path, rows)
    assert (error.key, error.got) == ("data.max_prompt_tokens", 3)
    assert error.expected.startswith("at least 5, ") and ".parquet row 3)" in error.expected
    assert error.cause.startswith("2 of 3 prompts of data.train ")


def test_overlong_prompts_can_be_dropped_and_are_counted(tmp_path):
    found = load(tmp_path, numbered("a b c", "a b c d"), truncation=Truncation.drop)
    assert found.num_dropped == 1
    assert [prompt.prompt_id for prompt in found.prompts] == ["s/0"]
    error = refused(load, tmp_path, numbered("a b c d"), truncation=Truncation.drop)
    assert error.key == "data.max_prompt_tokens" and "truncation" not in error.expected


def dapo_row(index, question, answer):
    """A row as DAPO-Math-17k and AIME-2024 have it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


REPEATED = [dapo_row("u1", "one", "34"), dapo_row("u2", "two", "5")] * 3


def test_repeated_rows_of_training_data_are_one_prompt_with_a_line_that_counts_them(
    tmp_path, caplog
):
    found = load(tmp_path, REPEATED)
    assert [prompt.prompt_id for prompt in found.prompts] == ["math_dapo/u1", "math_dapo/u2"]
    assert found.weights == (1.0, 1.0)
    (record,) = caplog.records
    assert record.args[:3] == ("data.train", 6, 2)


def test_repeated_rows_of_validation_data_are_samples_of_one_question(tmp_path, caplog):
    pq.write_table(pa.Table.from_pylist(REPEATED), tmp_path / "aime.parquet")
    found = load_files([DataFile(str(tmp_path / "aime.parquet"))], keep_repeats=True)
    names = [prompt.prompt_id for prompt in found.prompts]
    assert names == ["math_dapo/u1", "math_dapo/u2"] * 3
    (record,) = caplog.records
    assert record.args[:3] == ("data.train", 6, 2)


def test_different_rows_with_one_index_get_ids_of_their_own(tmp_path, caplog):
    """The train and test files of gsm8k both count from 0."""
    rows = [
        {**row(text), "extra_info": {"index": 0, "split": split}}
        for text, split in (("one", "train"), ("two", "test"), ("three", "other"), ("two", "test"))
    ]
    files = [write_lines(tmp_path / f"{index}.jsonl", [one]) for index, one in enumerate(rows)]
    found = load_files([DataFile(str(file)) for file in files])
    assert [prompt.prompt_id for prompt in found.prompts] == ["s/0", "s/0~2", "s/0~3"]
    assert [prompt.messages[0]["content"] for prompt in found.prompts] == ["one", "two", "three"]
    repeated, renamed = caplog.records
    assert repeated.args[:3] == ("data.train", 4, 3)
    assert renamed.args[:3] == ("data.train", 2, "s/0~2")


def test_an_index_beside_a_row_without_one_may_be_the_number_of_that_row(tmp_path):
    first, second = plain("one"), row("two", extra_info={"index": 0})
    file = write_lines(tmp_path / "a.jsonl", [first, second])
    found = load_files([DataFile(str(file))])
    assert [prompt.prompt_id for prompt in found.prompts] == ["s/0", "s/0~2"]


def test_equal_questions_with_another_ground_truth_or_other_tools_are_different_prompts(tmp_path):
    rows = [
        row(),
        row(reward_model={"ground_truth": "2"}),
        row(extra_info={"index": 5}),
        row(tools='[{"name": "book"}]'),
    ]
    file = write_lines(tmp_path / "a.jsonl", rows)
    assert len(load_files([DataFile(str(file))]).prompts) == 4


def test_a_prompt_of_two_files_has_the_larger_weight(tmp_path):
    files = [write_lines(tmp_path / name, [row()]) for name in ("a.jsonl", "b.jsonl")]
    found = load_files([DataFile(str(files[0]), 0.5), DataFile(str(files[1]), 2.0)])
    assert ([prompt.prompt_id for prompt in found.prompts], found.weights) == (["s/5"], (2.0,))


def test_digests_tell_which_file_has_other_rows_or_another_order(tmp_path):
    first, second = numbered("a", "b")

    def digests(*tables):
        files = [
            write_lines(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(tables)
        ]
        return load_files([DataFile(str(file)) for file in files]).files

    original = digests([first], [second, row("c")])
    assert [Path(file.path).name for file in original] == ["0.jsonl", "1.jsonl"]
    assert digests([first], [second, row("c")]) == original
    for rows in (
        [row("c"), second],
        [second, row("d")],
        [second, row("c", reward_model={"ground_truth": "2"})],
        [second, row("c", tools='[{"name": "book"}]')],
        [second, row("c", extra_info={"index": 5})],
        [second],
    ):
        changed = digests([first], rows)
        assert changed[0] == original[0] and changed[1] != original[1]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reward_model": "34"}, id="truth_without_a_struct"),
        pytest.param({"prompt": ""}, id="empty_text"),
        pytest.param({"prompt": " \n"}, id="blank_text"),
        pytest.param({"prompt": []}, id="no_message"),
        pytest.param({"prompt": 3}, id="prompt_of_another_type"),
        pytest.param({"prompt": [{"role": "user"}]}, id="message_without_content"),
        pytest.param({"data_source": 3}, id="source_of_another_type"),
    ],
)
def test_a_malformed_row_is_refused(tmp_path, changes):
    with pytest.raises(InputError) as caught:
        load(tmp_path, [row(**changes)])
    (column,) = changes
    assert caught.value.name.endswith(f"row 1, column {column}")


def test_calls_and_lists_survive_parquet(tmp_path):
    call = {"function": {"name": "find", "arguments": {"ids": [1, 2]}}}
    messages = [
        {"role": "user", "content": "x", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": None, "tool_calls": None},
        {"role": "user", "content": "y", "tool_calls": None},
    ]
    (prompt,) = load(tmp_path, [row(prompt=messages)]).prompts
    assert [message["content"] for message in prompt.messages] == ["x", "", "", "y"]
    assert prompt.messages[1]["tool_calls"] == [call]
    assert "tool_calls" not in prompt.messages[0]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def plain(text, **changes):
    made = row(text)
    del made["extra_info"]
    return made | changes


def test_several_files_are_one_dataset_with_the_weights_of_the_files(tmp_path):
    pq.write_table(pa.Table.from_pylist([plain("a"), plain("b")]), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", [plain("c d")])
    found = load_files(
        [DataFile(str(tmp_path / "a.parquet")), DataFile(str(tmp_path / "b.jsonl"), 0.5)]
    )
    assert [prompt.prompt_id for prompt in found.prompts] == ["s/0", "s/1", "s/2"]
    assert found.prompts[2].token_ids == (1, 1)
    assert found.weights == (1.0, 1.0, 0.5)


def test_weights_follow_their_prompts_when_some_are_dropped(tmp_path):
    long, short = plain("a b c d"), plain("a")
    files = [
        write_lines(tmp_path / "a.jsonl", [long, short]),
        write_lines(tmp_path / "b.jsonl", [short]),
    ]
    found = load_files(
        [DataFile(str(files[0])), DataFile(str(files[1]), 2.0)], truncation=Truncation.drop
    )
    assert ([one.prompt_id for one in found.prompts], found.weights) == (["s/1", "s/2"], (1.0, 2.0))


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation.left, (4, 5, 9, 9)),
        (Truncation.right, (1, 2, 9, 9)),
        (Truncation.middle, (1, 5, 9, 9)),
    ],
)
def test_a_cut_prompt_keeps_its_generation_prompt(tmp_path, truncation, expected):
    codec = WordCodec()
    codec.generation_prompt_ids = (9, 9)
    file = write_lines(tmp_path / "a.jsonl", [plain("1 22 333 4444 55555"), plain("1")])
    found = load_files(
        [DataFile(str(file))], codec=codec, max_prompt_tokens=4, truncation=truncation
    )
    assert [prompt.token_ids for prompt in found.prompts] == [expected, (1, 9, 9)]
    assert (found.num_truncated, found.num_dropped) == (1, 0)
    assert found.prompts[0].messages[0]["content"] == "1 22 333 4444 55555"


def test_columns_may_have_other_names_and_a_prompt_may_be_a_text(tmp_path):
    rows = [{"question": "a b", "domain": "d", "reward_model": {"ground_truth": "1"}}]
    files = [DataFile(str(write_lines(tmp_path / "a.jsonl", rows)))]
    (prompt,) = load_files(files, prompt_key="question", reward_fn_key="domain").prompts
    assert (prompt.prompt_id, prompt.data_source) == ("d/0", "d")
    assert prompt.messages == ({"role": "user", "content": "a b"},)
    with pytest.raises(InputError) as caught:
        load_files(files, reward_fn_key="domain")
    assert caught.value.name.endswith("line 1")
    assert "prompt" in caught.value.expected


def test_the_prompt_template_renders_every_prompt(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ content }} {{ row.extra_info.index }}")
    (prompt,) = load(tmp_path, [row("one two")], prompt_template=str(path)).prompts
    assert prompt.messages[0]["content"] == "one two 5"
    assert prompt.token_ids == (3, 3, 1)


class Rows:
    """A user dataset over files of words."""

    def __init__(self, paths, key):
        self.words = [(path, word) for path in paths for word in open(path).read().split()]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return plain(self.words[index][1])


def test_a_user_class_gives_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("mega_agentrl.data.rl_dataset.load_dataset_class", lambda name: Rows)
    (tmp_path / "words").write_text("aa bbb")
    found = load_files([DataFile(str(tmp_path / "words"))], dataset_class="my:Rows")
    assert [prompt.token_ids for prompt in found.prompts] == [(2,), (3,)]
    assert [prompt.prompt_id for prompt in found.prompts] == ["s/0", "s/1"]


@pytest.mark.parametrize("wrap", [lambda v: {"a": v}, lambda v: [v], lambda v: (v,)])
def test_a_row_of_a_users_dataset_that_is_nested_too_deeply_is_named(tmp_path, monkeypatch, wrap):
    deep = "x"
    for _ in range(2000):
        deep = wrap(deep)

    class Rows(list):
        def __init__(self, paths, key):
            super().__init__([row(), row(other=deep)])

    monkeypatch.setattr("mega_agentrl.data.rl_dataset.load_dataset_class", lambda name: Rows)
    with pytest.raises(ConfigError) as caught:
        load_files([DataFile(str(tmp_path / "words"))], dataset_class="my:Rows")
    assert caught.value.key == "data.train, data.dataset_class=my:Rows index 1"


def test_remote_files_are_read_from_the_cache_folder(tmp_path):
    text = json.dumps(row("far away"))
    fsspec.filesystem("memory").pipe("/dataset/far.jsonl", text.encode())
    files = [DataFile("memory://dataset/far.jsonl")]
    with pytest.raises(ConfigError) as caught:
        load_files(files)
    assert caught.value.got == files[0].path
    found = load_prompts(
        files, WordCodec(), DataConfig(), key="data.train", cache_folder=tmp_path / "c"
    )
    assert found.prompts[0].token_ids == (3, 4)


CUTS = (Truncation.left, Truncation.right, Truncation.middle)


def test_truncation_cuts_left_right_or_middle_and_keeps_the_generation_prompt():
    ids = (0, 1, 2, 3, 4, 5, 6, 90, 91)
    assert truncate_tokens(ids, 2, 7, Truncation.left) == (2, 3, 4, 5, 6, 90, 91)
    assert truncate_tokens(ids, 2, 7, Truncation.right) == (0, 1, 2, 3, 4, 90, 91)
    assert truncate_tokens(ids, 2, 7, Truncation.middle) == (0, 1, 2, 5, 6, 90, 91)
    assert truncate_tokens(ids, 2, 3, Truncation.middle) == (0, 90, 91)
    assert truncate_tokens(ids, 0, 2, Truncation.middle) == (0, 91)


def test_the_generation_prompt_is_the_part_after_the_common_prefix():
    assert num_generation_prompt_tokens([1, 2, 3, 8, 9], [1, 2, 3]) == 2
    assert num_generation_prompt_tokens([1, 2, 3], [1, 2, 3]) == 0
    # A template that ends a turn otherwise.
    assert num_generation_prompt_tokens([1, 2, 8, 9], [1, 2, 7]) == 2


def test_truncation_without_room_or_mode_is_refused():
    with pytest.raises(ConfigError) as caught:
        truncate_tokens((1, 2, 3, 4), 2, 2, Truncation.left)
    assert (caught.value.key, caught.value.got) == ("data.max_prompt_tokens", 2)
    with pytest.raises(ConfigError) as caught:
        truncate_tokens((1, 2, 3, 4), 1, 2, Truncation.drop)
    assert (caught.value.key, caught.value.got) == ("data.truncation", Truncation.drop)


@given(st.integers(0, 40), st.integers(0, 5), st.integers(6, 30), st.sampled_from(CUTS))
def test_truncation_keeps_order_limit_and_end(size, num_last, limit, where):
    ids = tuple(range(size + num_last))
    kept = truncate_tokens(ids, num_last, limit, where)
    assert len(kept) == min(len(ids), limit)
    assert list(kept) == sorted(kept)
    assert kept[len(kept) - num_last :] == ids[len(ids) - num_last :]
