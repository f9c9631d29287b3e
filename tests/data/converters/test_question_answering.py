"""Search-R1, GSM8K and ARPO's parquet, whose backspaces are repaired."""

import pytest

from mega_agentrl.data.converters.question_answering import (
    convert_arpo,
    convert_gsm8k,
    convert_search_r1,
)
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.errors import InputError
from mega_agentrl.tool.gsm8k import Gsm8kTool

GSM8K = {
    "question": "Janet has 16 eggs and eats 7. She sells the rest at $2. How much?",
    "answer": "She sells 16 - 7 = <<16-7=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18",
}


def rows(*values):
    return [SourceRow("r.parquet", f"row {n}", value) for n, value in enumerate(values, 1)]


def arpo(index=0, **changes):
    system = "Put the answer in \\boxed. For example <answer> \x08oxed{answer here} </answer>"
    return {
        "data_source": "hotpotqa",
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": "Who?"},
        ],
        "ability": "qa",
        "reward_model": {"ground_truth": "Ann", "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
        **changes,
    }


def test_search_r1_takes_every_golden_answer():
    first, second = convert_search_r1(
        rows(
            {"id": "test_0", "question": "who got it\n", "golden_answers": ["Ann", "Ann B."]},
            {
                "data_source": "nq",
                "question": "who?",
                "reward_model": {"ground_truth": {"target": ["Bo"]}},
            },
        ),
        "search_r1",
    ).rows
    assert first["reward_model"]["ground_truth"] == ["Ann", "Ann B."]
    assert first["prompt"][1] == {"role": "user", "content": "who got it"}
    assert "\\boxed" in first["prompt"][0]["content"]
    assert first["extra_info"]["tools_kwargs"] == {"search": {"create_kwargs": None}}
    assert (first["data_source"], second["data_source"]) == ("search_r1", "nq")
    assert second["reward_model"]["ground_truth"] == ["Bo"]


def test_numbers_among_golden_answers_are_their_texts():
    (row,) = convert_search_r1(rows({"question": "?", "golden_answers": ["three", 3]}), "q").rows
    assert row["reward_model"]["ground_truth"] == ["three", "3"]


@pytest.mark.parametrize("answers", [[], [""], [None], None])
def test_search_r1_without_answers_is_an_error(answers):
    with pytest.raises(InputError) as caught:
        convert_search_r1(rows({"question": "?", "golden_answers": answers}), "search_r1")
    assert caught.value.name == "r.parquet row 1, field golden_answers"


def test_gsm8k_gives_its_tool_the_answer():
    (row,) = convert_gsm8k(rows(GSM8K), "gsm8k").rows
    assert row["reward_model"]["ground_truth"] == "18"
    assert row["extra_info"]["tools_kwargs"] == {"gsm8k": {"create_kwargs": {"ground_truth": "18"}}}
    Gsm8kTool().check_kwargs(row["extra_info"]["tools_kwargs"]["gsm8k"])
    assert all("#### 18" not in message["content"] for message in row["prompt"])


@pytest.mark.parametrize(
    ("end", "number"), [("#### 1,080", "1080"), ("#### -3", "-3"), ("#### $2.50\n", "2.50")]
)
def test_numbers_of_gsm8k_lose_separators_and_currency(end, number):
    (row,) = convert_gsm8k(rows({**GSM8K, "answer": f"So.\n{end}"}), "gsm8k").rows
    assert row["reward_model"]["ground_truth"] == number


@pytest.mark.parametrize("answer", ["18", "#### eighteen", "####"])
def test_gsm8k_without_a_number_is_an_error(answer):
    with pytest.raises(InputError) as caught:
        convert_gsm8k(rows({**GSM8K, "answer": answer}), "gsm8k")
    assert (caught.value.name, caught.value.got) == ("r.parquet row 1, field answer", answer)


def test_arpo_backspaces_become_what_was_meant_and_are_counted():
    sound = arpo(prompt=[{"role": "user", "content": "a \\boxed b"}])
    converted = convert_arpo(rows(arpo(), sound), "arpo")
    system = converted.rows[0]["prompt"][0]["content"]
    assert system.endswith("<answer> \\boxed{answer here} </answer>")
    assert "\x08" not in system
    assert converted.rows[1]["prompt"] == sound["prompt"]
    assert dict(converted.notes) == {
        "rows with repaired backspace characters": 1,
        "backspace characters replaced by \\b": 1,
    }


def test_arpo_keeps_the_rest_and_numbers_rows_anew():
    first, second = convert_arpo(rows(arpo(7), arpo(7)), "arpo").rows
    assert first["data_source"] == "hotpotqa"
    assert first["reward_model"]["ground_truth"] == "Ann"
    assert first["extra_info"] == {"index": 0, "source_index": "7", "split": "train"}
    assert second["extra_info"]["index"] == 1


def test_arpo_ground_truths_are_all_lists_where_one_is():
    several = arpo(reward_model={"ground_truth": ["a", "b"]})
    made = convert_arpo(rows(arpo(), several), "arpo").rows
    assert [row["reward_model"]["ground_truth"] for row in made] == [["Ann"], ["a", "b"]]


def test_arpo_structs_that_parquet_cannot_hold_are_left_out():
    extra = {"index": 1, "interaction_kwargs": {}, "tools_kwargs": {"search": {}}}
    (made,) = convert_arpo(rows(arpo(extra_info=extra)), "arpo").rows
    assert made["extra_info"] == {
        "index": 0,
        "source_index": "1",
        "tools_kwargs": {"search": {"create_kwargs": None}},
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"reward_model": {"ground_truth": []}}, "reward_model.ground_truth"),
        ({"reward_model": None}, "reward_model"),
    ],
)
def test_a_bad_arpo_row_is_named(change, field):
    with pytest.raises(InputError) as caught:
        convert_arpo(rows(arpo(**change)), "arpo")
    assert caught.value.name == f"r.parquet row 1, field {field}"
