"""What the documentation shows works as it says."""

import asyncio
import re
from pathlib import Path

import pytest

from mega_agentrl.reward.user_reward import run
from mega_agentrl.tool.user_tools import load_user_tools

ROOT = Path(__file__).resolve().parents[2]


def test_the_tool_is_loaded_and_answers():
    (tool,) = load_user_tools(ROOT / "examples" / "my_tools.yaml")
    function = tool.schema()["function"]
    assert function["name"] == "convert"
    assert set(function["parameters"]["properties"]) == {"amount", "unit", "to"}
    answer = asyncio.run(tool.execute(None, {"amount": 3.0, "unit": "km", "to": "m"}, {}))
    assert answer.text == "3000 m"
    with pytest.raises(ValueError, match="unknown unit yard"):
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
def test_the_reward(said, score):
    path = f"{ROOT / 'examples' / 'my_reward.py'}:compute_score"
    values = {"data_source": "x", "solution_str": said, "ground_truth": "391", "extra_info": {}}
    found = run(path, values)
    assert found["score"] == pytest.approx(score)
    assert found["fields"]["length"] == len(said)


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
