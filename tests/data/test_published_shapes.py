"""Tables in the shapes of published data sets are read as they are."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.types.ground_truth import accepted_answers

GSM8K = {  # verl's examples/data_preprocess/gsm8k
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many? Let's think step by step."}],
    "ability": "math",
    "reward_model": {"ground_truth": "18", "style": "rule"},
    "extra_info": {"answer": "#### 18", "index": 0, "question": "How many?", "split": "train"},
}
DAPO = {  # BytedTsinghua-SIA/DAPO-Math-17k
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve. The last line is Answer: $Answer"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
SEARCH_R1 = {  # PeterJinGo/nq_hotpotqa_train
    "id": "train_0",
    "question": "who?",
    "golden_answers": ["Paris", "City of Paris"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. who?"}],
    "ability": "fact-reasoning",
    "reward_model": {
        "ground_truth": {"target": ["Paris", "City of Paris"]},
        "style": "rule",
    },
    "extra_info": {"index": 0, "split": "train"},
    "metadata": None,
}
ARPO = {  # dongguanting/ARPO-RL-Reasoning-10K
    "data_source": "math",
    "prompt": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "1+1?"},
    ],
    "ability": "math",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0, "need_tools_kwargs": True, "split": "train"},
}


@pytest.mark.parametrize(
    ("row", "prompt_id", "answers"),
    [
        pytest.param(GSM8K, "openai/gsm8k/0", ("18",), id="gsm8k"),
        pytest.param(
            DAPO, "math_dapo/9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", ("34",), id="dapo_math_17k"
        ),
        pytest.param(SEARCH_R1, "nq/0", ("Paris", "City of Paris"), id="search_r1"),
        pytest.param(ARPO, "math/0", ("2",), id="arpo_train_10k"),
    ],
)
def test_a_published_row_is_a_prompt_with_its_accepted_answers(tmp_path, row, prompt_id, answers):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    files = [DataFile(str(tmp_path / "train.parquet"))]
    (found,) = read_prompts(files, DataConfig(), key="data.train")
    assert found.prompt.prompt_id == prompt_id
    assert list(found.prompt.messages) == row["prompt"]
    assert found.prompt.ground_truth == row["reward_model"]["ground_truth"]
    assert accepted_answers(found.prompt.ground_truth) == answers
    assert found.prompt.extra_info == row["extra_info"]
