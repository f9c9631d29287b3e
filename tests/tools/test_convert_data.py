"""From a published file to prompts that the trainer loads."""

import json

import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.reward.call_parser import MAX_CHARS
from tools import convert_data

TOOLS = json.dumps([{"name": "f", "parameters": {"a": {"type": "str"}}}])


class WordCodec:
    """One id per word."""

    def apply_chat_template(self, messages, tools=None):
        return [len(word) for message in messages for word in message["content"].split()]


def xlam(number, **arguments):
    answers = json.dumps([{"name": "f", "arguments": arguments}])
    return {"id": number, "query": f"Question {number}?", "tools": TOOLS, "answers": answers}


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def load(path):
    return load_prompts(
        [DataFile(str(path))], WordCodec(), DataConfig(max_prompt_tokens=1000), key="data.train"
    ).prompts


def run(source, files, output, *more):
    inputs = [str(file) for file in files]
    arguments = ["--source", source, "--input", *inputs, "--output", str(output), *more]
    return convert_data.main(arguments)


def test_calls_become_prompts_that_load(tmp_path, capsys):
    source = write(tmp_path / "x.jsonl", [xlam(0, a="x"), xlam(1, a="y")])
    output = tmp_path / "train.parquet"
    assert run("xlam-function-calling", [source], output) == 0
    prompts = load(output)
    assert [p.prompt_id for p in prompts] == ["xlam-function-calling/0", "xlam-function-calling/1"]
    assert prompts[1].ground_truth == '[{"name": "f", "arguments": {"a": "y"}}]'
    assert prompts[1].tools_kwargs == {}
    assert "2 rows from 2" in capsys.readouterr().out


def test_bfcl_question_and_answer_files_are_joined(tmp_path):
    question = {
        "id": "simple_0",
        "question": [[{"role": "user", "content": "?"}]],
        "function": json.loads(TOOLS),
    }
    answer = {"id": "simple_0", "ground_truth": [{"f": {"a": ["x", ""]}}]}
    files = [write(tmp_path / "q.json", [question]), write(tmp_path / "a.json", [answer])]
    assert run("bfcl", files, tmp_path / "o.parquet") == 0
    (prompt,) = load(tmp_path / "o.parquet")
    assert prompt.extra_info["turns"] == "single_turn"
    assert json.loads(prompt.ground_truth) == [
        {"name": "f", "accepted": {"a": ["x", ""]}, "optional": ["a"]}
    ]


@pytest.mark.parametrize(
    ("source", "row", "tools"),
    [
        ("search_r1", {"question": "who?", "golden_answers": ["Ann"]}, {"search": {}}),
        (
            "gsm8k",
            {"question": "1+1?", "answer": "#### 2"},
            {"gsm8k": {"create_kwargs": {"ground_truth": "2"}}},
        ),
        (
            "arpo",
            {
                "data_source": "qa",
                "prompt": [{"role": "user", "content": "who?"}],
                "reward_model": {"ground_truth": "Ann"},
                "extra_info": {"index": 7, "tools_kwargs": {"search": {}}},
            },
            {"search": {}},
        ),
    ],
)
def test_the_tools_of_a_question_reach_its_prompt(tmp_path, source, row, tools):
    assert run(source, [write(tmp_path / "s.jsonl", [row])], tmp_path / "o.parquet") == 0
    (prompt,) = load(tmp_path / "o.parquet")
    assert prompt.tools_kwargs == tools


def test_limit_force_and_determinism(tmp_path):
    source = write(tmp_path / "x.jsonl", [xlam(i, a=i) for i in range(5)])
    output, again = tmp_path / "a.parquet", tmp_path / "b.parquet"
    assert run("function_calling", [source], output, "--limit", "3") == 0
    assert len(load(output)) == 3
    assert run("function_calling", [source], output) == 2
    assert len(load(output)) == 3
    assert run("function_calling", [source], output, "--force") == 0
    assert run("function_calling", [source], again) == 0
    assert output.read_bytes() == again.read_bytes()


def test_a_ground_truth_the_reward_cannot_read_is_left_out_and_named(tmp_path, capsys):
    source = write(tmp_path / "x.jsonl", [xlam(0, a="x"), xlam(1, a="x" * MAX_CHARS)])
    assert run("function_calling", [source], tmp_path / "o.parquet") == 0
    assert len(load(tmp_path / "o.parquet")) == 1
    printed = capsys.readouterr()
    assert "ground truth: 1\n" in printed.out and "left out 1: " in printed.err


def test_rows_that_are_all_bad_are_one_line_and_leave_no_file(tmp_path, capsys):
    source = write(tmp_path / "x.jsonl", [{**xlam(0), "answers": "[{"}, {**xlam(1), "query": ""}])
    assert run("function_calling", [source], tmp_path / "o.parquet") == 2
    error = capsys.readouterr().err
    assert f"{source} line 1, field answers" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert run("function_calling", [source], tmp_path / "o.parquet", "--limit", "0") == 2
