"""Rows become prompts; a bad row is an error that names setting, file, row and column."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.config.schema import Overlong
from mega_agentrl.data.dataset import check_messages, load_prompts


class WordCodec:
    """One id per word; rendered tools cost 100 each."""

    def apply_chat(self, messages, tools=None):
        words = " ".join(message["content"] for message in messages).split()
        return [len(word) for word in words] + [100] * len(tools or [])


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
    defaults = {"key": "data.train", "max_prompt_tokens": 3, "overlong": Overlong.error}
    return load_prompts(path, WordCodec(), **{**defaults, **options})


def test_a_row_becomes_a_prompt(tmp_path):
    (prompt,) = load(tmp_path, [row()]).prompts
    assert prompt.prompt_id == "s/5"
    assert prompt.data_source == "s"
    assert prompt.messages == ({"role": "user", "content": "one two"},)
    assert prompt.ground_truth == "1"
    assert prompt.token_ids == (3, 3)
    assert prompt.tools_kwargs == {"python": {"create_kwargs": {"k": 1}}}
    assert prompt.extra_info == {"index": 5}


def test_rows_keep_their_own_tools_although_parquet_merges_the_structs(tmp_path):
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


def test_ground_truth_may_be_a_list(tmp_path):
    truths = {"ground_truth": ["a", "b"]}
    assert load(tmp_path, [row(reward_model=truths)]).prompts[0].ground_truth == ("a", "b")


def test_schemas_of_the_prompts_tools_reach_the_template(tmp_path):
    schemas = {"python": {"name": "python"}, "search": {"name": "search"}}
    (prompt,) = load(tmp_path, [row()], tool_schemas=schemas).prompts
    assert prompt.token_ids == (3, 3, 100)


def test_without_a_choice_the_template_gets_all_schemas(tmp_path):
    schemas = {"python": {"name": "python"}, "search": {"name": "search"}}
    everything, one = numbered("a", "b")
    one["extra_info"]["tools_kwargs"] = {"search": {"create_kwargs": {"k": 1}}}
    first, second = load(tmp_path, [everything, one], tool_schemas=schemas).prompts
    assert first.token_ids == (1, 100, 100) and len(first.tool_schemas) == 2
    assert second.token_ids == (1, 100) and second.tool_schemas == ({"name": "search"},)
    assert load(tmp_path, [row()]).prompts[0].tool_schemas == ()


def test_missing_tools_kwargs_are_named_where_they_are_needed(tmp_path, caplog):
    rows = numbered("a", "b", "c", "d")
    for each, need in zip(rows, (None, False, True, True), strict=True):
        each["extra_info"]["need_tools_kwargs"] = need
    rows[3]["extra_info"]["tools_kwargs"] = {"python": {"create_kwargs": {"k": 1}}}
    load(tmp_path, rows)
    assert [record.getMessage() for record in caplog.records] == [
        "data.train row 2: no tools_kwargs, expected some; index 2, data source s"
    ]


def numbered(*texts):
    return [row(text, extra_info={"index": index}) for index, text in enumerate(texts)]


def test_overlong_prompts_are_an_error_that_counts_them(tmp_path):
    rows = numbered("a b c", "a b c d", "a b c d e")
    with pytest.raises(ValueError, match=r"2 of 3 prompts are longer .*=3 \(the longest has 5"):
        load(tmp_path, rows)


def test_overlong_prompts_can_be_dropped_and_are_counted(tmp_path):
    found = load(tmp_path, numbered("a b c", "a b c d"), overlong=Overlong.drop)
    assert found.num_dropped == 1
    assert [prompt.prompt_id for prompt in found.prompts] == ["s/0"]
    with pytest.raises(ValueError, match="1 of 1 prompts are longer"):
        load(tmp_path, numbered("a b c d"), overlong=Overlong.drop)


def test_two_rows_with_one_id(tmp_path):
    with pytest.raises(ValueError, match="row 1: id s/5 occurs twice"):
        load(tmp_path, [row(), row()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model": {"style": "rule"}}, "row 0, column reward_model"),
        ({"reward_model": {"ground_truth": 4}}, "row 0, column reward_model"),
        ({"prompt": "What is 1+1?"}, "row 0, column prompt: got 'What is 1"),
        ({"prompt": [{"role": "user"}]}, "row 0, column prompt: got message"),
        ({"data_source": 3}, "row 0, column data_source"),
    ],
)
def test_a_malformed_row(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, [row(**changes)])


def test_a_missing_column(tmp_path):
    bad = row()
    del bad["reward_model"]
    with pytest.raises(ValueError, match=r"data\.train=.*missing column reward_model"):
        load(tmp_path, [bad])


def test_messages_lose_members_of_other_rows():
    value = [{"role": "user", "content": "x", "name": None}]
    assert check_messages(value, "here") == ({"role": "user", "content": "x"},)


@pytest.mark.parametrize("message", ["hello", None, 3, ["user", "x"], {"role": "user"}])
def test_a_message_that_is_none_is_named(message):
    with pytest.raises(ValueError, match=r"row 4: got message .*expected string members role"):
        check_messages([message], "train.parquet row 4")
