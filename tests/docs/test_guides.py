"""The examples of the guides, as they stand there, are loaded and called.

`test_commands` runs the commands of all pages as far as the check of their input.
"""

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mega_agentrl.cli import load_user_algorithm
from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.override_keys import (
    check_overrides,
    parse_command_line,
    register_schema,
)
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.orders.dataset_writer import INTERACTION_FILE
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.reward.user_reward import find_problem, run
from mega_agentrl.rollout.interaction.base import load_interactions
from mega_agentrl.rollout.interaction.session import load_interaction_registry
from mega_agentrl.tool.toolkit import ToolKit, load_mcp_servers
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.train.estimators.registry import AdvantageInputs, load_user_advantage
from mega_agentrl.train.trajectory_rows import TrajectoryRows
from mega_agentrl.types.records import ToolStatus
from tests.docs.blocks import ROOT, commands, read_blocks
from tests.train.test_advantages import batch

pytestmark = pytest.mark.extended

GUIDES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("own_tool", "own_reward", "own_algorithm", "own_agent", "own_user")
    ),
    "docs/data.md",
)
DEADLINE_S = 120
MAX_UNTESTED = 1

BLOCKS = [block for guide in GUIDES for block in read_blocks(guide)]
TESTED = [block for block in BLOCKS if not block.untested]
FILES = [
    block
    for block in TESTED
    if block.file and (block.language in ("python", "yaml") or block.file.startswith("examples/"))
]
FRAGMENTS = [
    block for block in TESTED if block.language in ("python", "yaml", "jinja") and not block.file
]
RECORDS = [block for block in TESTED if block.language == "json" and block not in FILES]
SHELL = [block for block in TESTED if not block.language]


def overrides_of(words):
    """Overrides of a command that composes a configuration, else None.

    Overrides alone stand for a smoke run with them.
    """
    if words[:3] == [".venv/bin/python", "-m", "mega_agentrl"]:
        return words[3:]
    if words[0] == "make" and words[-1].startswith("ARGS=") and words[1] in ("train", "preflight"):
        given = shlex.split(words[-1].removeprefix("ARGS="))
        return [word for word in given if "=" in word]
    return words if all("=" in word for word in words) else None


def overrides_of_runs():
    for block in SHELL:
        for number, words in enumerate(commands(block), start=1):
            given = overrides_of(words)
            # Help composes nothing, and the launcher's keys are those of a plugin.
            if given is not None and not re.search(r"--help|hydra/", " ".join(given)):
                yield pytest.param(block, given, id=f"{block.id}-command_{number}")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a function that makes a folder with a guide's files the working folder."""

    def place(guide):
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
        generated = tmp_path / "runs" / "orders" / "interaction.yaml"  # by `make train`
        generated.parent.mkdir(parents=True)
        generated.write_text(INTERACTION_FILE)
        for block in FILES:
            if block.page == guide:
                (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / block.file).write_text(block.text)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return place


def run_within_deadline(work):
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def test_every_block_is_of_a_known_kind():
    known = (*FILES, *RECORDS, *SHELL, *FRAGMENTS)
    assert not [block.id for block in TESTED if block not in known]
    for block in FRAGMENTS:  # of python; `test_commands` reads the others
        compile(block.text if block.language == "python" else "", block.id, "exec")
    assert sum(bool(block.untested) for block in BLOCKS) <= MAX_UNTESTED
    fences = sum((ROOT / guide).read_text().count("\n```") for guide in GUIDES)
    assert fences == 2 * len(BLOCKS) > 60


def test_every_command_is_of_a_known_kind():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    known = {"make": lambda words: words[1] in targets, "xdg-open": lambda words: len(words) == 2}
    known["sbatch"] = lambda words: any(
        word.endswith(".sh") and (ROOT / word).is_file() for word in words
    )
    for block in SHELL:
        for words in commands(block):
            if words[0].endswith("/"):  # a list of the repository's folders
                assert (ROOT / words[0]).is_dir()
            elif overrides_of(words) is None:
                assert words[0] in known and known[words[0]](words), (block.id, words)


@pytest.mark.parametrize(
    "block", [one for one in FILES if one.file.startswith("examples/")], ids=lambda one: one.id
)
def test_what_a_guide_shows_of_an_example_is_in_the_example(block):
    assert block.text in (ROOT / block.file).read_text()


@pytest.mark.parametrize("block", FILES, ids=lambda one: one.id)
def test_every_file_is_used_by_a_run_or_a_list(block, place):
    """Whatever is shown is also tested: nothing loads a file that nothing names."""
    if block.language == "yaml":
        entries = yaml.safe_load(block.text)
        entries = entries["tools"] if isinstance(entries, dict) else entries
        assert all("class_name" in entry for entry in entries)
        return
    name = Path(block.file).name
    others = [one.text for one in TESTED if one.page == block.page and one is not block]
    assert any(name in text for text in others)


def compose_run(overrides):
    """Return the configuration of a run as the command line composes it."""
    register_schema()
    folder = find_config_dir()
    given = parse_command_line(overrides).overrides
    overrides = [one for one in given if not one.endswith("=...")]
    check_overrides(overrides, folder)
    names_model = any(one.startswith("model=") for one in overrides)
    has_experiment = any(one.startswith("experiment=") for one in overrides)
    if not (names_model or has_experiment):
        overrides = ["experiment=smoke", *overrides]
    with initialize_config_dir(str(folder), version_base="1.3"):
        return OmegaConf.to_object(compose("train", overrides))


@pytest.mark.parametrize(("block", "overrides"), list(overrides_of_runs()))
def test_a_run_is_composed_and_loads_the_files_that_it_names(block, overrides, place):
    place(block.page)
    if "-m" in overrides:
        # A sweep: the last value of each key.
        overrides = [re.sub(r"=[^\[{]*,", "=", one) for one in overrides if one != "-m"]
    config = compose_run(overrides)
    if config.algo.has_user_advantage or config.algo.has_user_loss:
        check_algo(config)
    load_user_algorithm(config)
    tools = load_user_tools(config.tool.user_tools_file) if config.tool.user_tools_file else []
    file = config.rollout.interaction_config_file
    load_interaction_registry(file, ToolKit(tools).names)
    load_mcp_servers(config.tool, {}, user_tools=tools)
    for path in config.reward.functions.values():
        assert find_problem(path) == ""


@pytest.mark.parametrize("block", RECORDS, ids=lambda one: one.id)
def test_a_record_is_a_valid_prompt(block, place):
    folder = place(block.page)
    record = json.loads(block.text)
    row = record
    if block.file == "extra_info":
        row = {"prompt": "?", "data_source": "s", "reward_model": {"ground_truth": "1"}}
        row["extra_info"] = record
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (found,) = read_prompts([DataFile("rows.jsonl")], DataConfig(), key="data.train")
    if "tools_kwargs" in record:
        assert found.prompt.tools_kwargs == record["tools_kwargs"]
        ToolKit(load_user_tools("notes.yaml")).check_prompt_kwargs([found.prompt])
    if "interaction_kwargs" in record:
        registry = load_interaction_registry("users.yaml", ())
        registry.check_prompt_kwargs([found.prompt])
        assert registry.open_session(found.prompt) is not None


def test_the_function_answers_a_call_in_tags(place):
    place("docs/own_tool.md")
    toolkit = ToolKit(load_user_tools("examples/my_tools.yaml"))
    text = re.search(r"`(<convert>.*?</convert>)`", (ROOT / "docs/own_tool.md").read_text())[1]

    async def call():
        session = toolkit.open_session()
        await session.create({})
        (parsed,) = toolkit.parse_calls(text)
        return await session.execute(parsed.tool, parsed.arguments)

    outcome = run_within_deadline(call())
    assert (outcome.status, outcome.answer) == (ToolStatus.ok, "1.86411 mile")


@pytest.mark.parametrize("file", ["notes.yaml", "verl_form.yaml"], ids=["own", "verl_form"])
def test_the_class_keeps_notes_for_each_branch(file, place):
    place("docs/own_tool.md")
    toolkit = ToolKit(load_user_tools(file))

    async def talk():
        session = toolkit.open_session()
        await session.create({"notes": {"create_kwargs": {"limit": 2}}})
        first = await session.execute("notes", {"text": "a"})
        branch = await session.fork()
        second = await session.execute("notes", {"text": "b"})
        third = await session.execute("notes", {"text": "c"})
        other = await branch.execute("notes", {"text": "d"})
        for one in (session, branch):
            await one.release()
        return first, second, third, other

    first, second, third, other = run_within_deadline(talk())
    assert (first.status, first.answer) == (ToolStatus.ok, "* a")
    assert second.answer == "* a\n* b"
    assert third.status is ToolStatus.user_error and "room for 2" in third.answer
    assert other.answer == "* a\n* d"


def test_the_reward_gives_a_score_and_fields(place):
    folder = place("docs/own_reward.md")
    values = {"data_source": "x", "ground_truth": "391", "extra_info": {}}
    path = f"{folder}/examples/my_reward.py:compute_score"
    found = run(path, values | {"solution_str": r"so \boxed{391}"})
    assert found["score"] == 1.0 and found["fields"] == {"right": True, "length": 14}
    assert run(path, values | {"solution_str": "391"})["score"] == 0.0


def test_the_advantage_is_what_its_docstring_says(place):
    folder = place("docs/own_algorithm.md")
    advantage = load_user_advantage(f"{folder}/examples/my_algorithm.py")
    rows = batch(
        reward_B=torch.tensor([0.0, 1.0, 2.0, 2.0]),
        entropy_BT=torch.tensor([[0.5, 3.0]] * 4),
    )
    inputs = AdvantageInputs(batch=rows, rows=TrajectoryRows.from_batch(rows))
    found_BT = advantage(inputs, None).advantage
    torch.testing.assert_close(
        found_BT, torch.tensor([[-0.75, -1.0], [0.75, 1.0], [0.0, 0.0], [0.0, 0.0]])
    )


def test_the_user_who_thinks_of_a_number_ends_at_the_right_guess(place):
    place("docs/own_user.md")
    (guess,) = load_interactions("guess.yaml")
    assert guess.name == "guess"

    async def talk():
        state = await guess.create({"number": "7"})
        branch = await guess.fork(state)
        guesses = ("I guess 5", "9", "hm", "it is 7")
        replies = [await guess.respond(state, [{"content": text}]) for text in guesses]
        return replies, await guess.calc_reward(state), await guess.calc_reward(branch)

    replies, reward, other = run_within_deadline(talk())
    assert [reply.text for reply in replies[:2]] == ["Too small.", "Too large."]
    assert [reply.is_last for reply in replies] == [False, False, False, True]
    assert replies[2].reward == -0.1
    assert (reward, other) == (1.0, 0.0)
