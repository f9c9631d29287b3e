"""What the documentation shows works as it says."""

import asyncio
import re
from pathlib import Path

import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.reward.user_reward import run
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.user_tools import load_user_tools

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_tool_is_loaded_and_answers():
    (tool,) = load_user_tools(ROOT / "examples" / "my_tools.yaml")
    function = tool.schema()["function"]
    assert function["name"] == "convert"
    assert set(function["parameters"]["properties"]) == {"amount", "unit", "to"}
    answer = asyncio.run(tool.execute(None, {"amount": 3.0, "unit": "km", "to": "m"}, {}))
    assert answer.text == "3000 m"
    with pytest.raises(ToolInputError):
        asyncio.run(tool.execute(None, {"amount": 3.0, "unit": "yard", "to": "m"}, {}))


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (r"so \boxed{391}", 1.0),
        (r"so \boxed{390}", 0.0),
        (r"\boxed{391}" + " " * 789, 0.9),
        ("391", 0.0),
    ],
)
def test_the_example_reward_is_one_for_a_right_short_answer(said, score):
    path = f"{ROOT / 'examples' / 'my_reward.py'}:compute_score"
    values = {"data_source": "x", "solution_str": said, "ground_truth": "391", "extra_info": {}}
    found = run(path, values)
    assert found["score"] == pytest.approx(score)
    assert found["fields"]["length"] == len(said)


@pytest.mark.parametrize(
    "reference", ["examples.my_dataset:CsvRows", f"{ROOT}/examples/my_dataset.py:CsvRows"]
)
def test_the_example_dataset_reads_csv_files(reference, tmp_path):
    for name, lines in (("a", ['"2, or 1+1?",2', "3?,3"]), ("b", ["4?,4"])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["question,answer", *lines]))
    files = [DataFile(str(tmp_path / f"{name}.csv")) for name in "ab"]
    config = DataConfig(dataset_class=reference)
    prompts = [one.prompt for one in read_prompts(files, config, key="data.train")]
    assert [one.prompt_id for one in prompts] == [f"my_questions/{index}" for index in range(3)]
    assert prompts[0].messages == ({"role": "user", "content": "2, or 1+1?"},)
    assert [one.ground_truth for one in prompts] == ["2", "3", "4"]
    (tmp_path / "a.csv").write_text("text\n1")
    # The example raises what a user's own class would raise, an error without attributes.
    with pytest.raises(ValueError, match=r"data\.train=.*a\.csv: got \['text'\]"):
        read_prompts(files, config, key="data.train")


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
