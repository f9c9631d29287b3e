"""Every command and configuration of README and docs, as far as the check of its input.

Commands are run in this process: runs are composed and checked, tools parse their arguments with
their own parser, targets of make and scripts exist. Files that a page shows are there; models and
data that a user brings are stood in for. What a page shows as `...` or in brackets is left out.
"""

import argparse
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from mega_agentrl.config.checks.cross_section import check_config
from mega_agentrl.config.override_keys import (
    check_overrides,
    compose_settings,
    known_groups,
    known_sections,
    parse_command_line,
    register_schema,
)
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.sections.data import DataConfig, DataFile, parse_data_files
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.reward.llm_judge import JudgePrompt
from tests.docs.blocks import PAGES, ROOT, code_spans, commands, read_blocks
from tests.estimate.shapes import write_model_config
from tests.fakes import make_trajectory

PYTHON = ".venv/bin/python"
OTHER_PROGRAMS = {"xdg-open", "git", "cd", "mkdir", "chmod", "ffmpeg", ".venv/bin/tensorboard"}
CONTAINER_PROGRAMS = {"docker", "buildah", "apptainer", "enroot"}
MODELS = {"vision": "qwen3-vl-8b", "moe": "qwen3-30b-a3b", "32B": "qwen3-32b", "": "qwen3-4b"}
"""Released model that stands in for a `model.path`, by a part of the path."""
STAND_INS = {
    "experiment=...": "experiment=smoke",
    "model.path=...": "model.path=/models/mine",
    "data.train=...": "data.train=train.parquet",
    "data.validation=...": "data.validation=validation.parquet",
}
"""Values that replace the three dots of a command."""
USERS_FILES = ("sft.train_data", "sft.dev_data", "tool.search.source", "tool.user_tools_file")
QUICK_PAGE = "docs/own_environment.md"
"""Page whose commands are also tested by `make test`; `test_readme` has the runs of the README."""
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
CONFIGS = find_config_dir()


class ParsedError(Exception):
    """The arguments of a tool are valid."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a function that makes a folder with the files of a page the working folder."""

    def place(page):
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
        for block in read_blocks(page):
            if block.file and block.file != "extra_info":
                path = tmp_path / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
        return tmp_path

    return place


def without_placeholders(words):
    """The words without `...`, with a value in place of `key=...`."""
    given = [STAND_INS.get(word, word) for word in words]
    return [word for word in given if not word.endswith("...")]


def without_brackets(words):
    """The words without `[partition, account]` and the like."""
    return re.sub(r"\[[^\]]*\]", "", " ".join(words)).split()


def run_command(words, folder):
    """Run a command as far as the check of its input; fail if it is of no known kind."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if "&&" in words:
        end = words.index("&&")
        run_command(words[:end], folder)
        return run_command(words[end + 1 :], folder)
    program, rest = words[0], words[1:]
    if program.endswith("/"):  # a list of the repository's folders
        assert (ROOT / program).is_dir()
    elif words[:3] == [PYTHON, "-m", "mega_agentrl"]:
        check_run(words[3:], folder)
    elif words[:3] == [PYTHON, "-m", "pytest"] or program in OTHER_PROGRAMS:
        pass
    elif program in CONTAINER_PROGRAMS:
        assert all((ROOT / word).is_file() for word in rest if word.startswith("containers/"))
    elif program == "export":
        scripts = "".join(path.read_text() for path in (ROOT / "slurm").glob("*.sh"))
        assert all(word.partition("=")[0] in scripts for word in rest)
    elif program == "make":
        check_make(rest, folder)
    elif program == PYTHON or program.startswith("tools/"):
        check_tool(*(words if program != PYTHON else rest))
    elif program == "sbatch" or program.endswith(".sh"):
        (script,) = [word for word in words if word.endswith(".sh")]
        assert (ROOT / script).is_file()
        if overrides := without_brackets(words[words.index(script) + 1 :]):
            check_run(overrides, folder)
    elif program.startswith("runs/"):
        pass  # a file of a run
    else:
        assert all("=" in word for word in words), f"expected a known program, got {program}"
        check_run(words, folder)


def check_make(words, folder):
    """Check the target, and what it passes on."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert words[0] in targets
    given = dict(word.split("=", 1) for word in words[1:])
    arguments = without_placeholders(shlex.split(given.get("ARGS", "")))
    if words[0] == "smoke":
        check_run(["experiment=smoke", *arguments], folder)
    elif words[0] == "train":
        check_run(arguments, folder)
    elif words[0] == "preflight":
        check_tool("tools/preflight.py", *arguments)
        check_run([word for word in arguments if re.match(r"[a-z_.+@/]+=", word)], folder)


def check_tool(script, *arguments):
    """Load the tool and let its own parser read the arguments."""
    path = ROOT / script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *without_placeholders(list(arguments))])
        patch.syspath_prepend(str(path.parent))
        for name in ("parse_args", "parse_intermixed_args"):
            parse = getattr(argparse.ArgumentParser, name)
            patch.setattr(argparse.ArgumentParser, name, stop_after(parse))
        spec.loader.exec_module(module)
        given = sys.argv[1:] if inspect.signature(module.main).parameters else None
        with pytest.raises(ParsedError):
            module.main() if given is None else module.main(given)


def stop_after(parse):
    def parse_and_stop(parser, *arguments):
        parse(parser, *arguments)
        raise ParsedError

    return parse_and_stop


def check_run(words, folder, *config_dirs):
    """Compose the runs of a command line and check their settings."""
    register_schema()
    line = parse_command_line(without_placeholders(words))
    if line.asks_help:
        return
    overrides = [one for one in line.overrides if not one.startswith("hydra")]
    if not any(one.startswith(("experiment=", "model=")) for one in overrides):
        overrides = ["experiment=smoke", *overrides]
    for job in jobs_of_sweep(overrides) if line.is_sweep else [overrides]:
        check_overrides(job, CONFIGS, *config_dirs)
        composed = compose_settings(job, CONFIGS, *config_dirs)
        bring_files(composed, folder)
        check_config(OmegaConf.to_object(composed))


def jobs_of_sweep(overrides):
    """The overrides of each job, as Hydra's basic sweeper makes them."""
    jobs = [[]]
    for item in OverridesParser.create().parse_overrides(overrides):
        words = [item.input_line]
        if item.is_sweep_override():
            key = item.get_key_element()
            words = [f"{key}={value}" for value in item.sweep_string_iterator()]
        jobs = [[*job, word] for job in jobs for word in words]
    return jobs


def bring_files(composed, folder):
    """Create what a user brings: the model, and files that no page shows."""
    model = folder / "models" / Path(composed.model.path).name
    if not model.exists():
        model.mkdir(parents=True)
        name = next(MODELS[part] for part in MODELS if part in composed.model.path)
        write_model_config(model, name)
    composed.model.path = str(model)
    files = {str(OmegaConf.select(composed, key) or "") for key in USERS_FILES}
    files.add(composed.rollout.interaction_config_file)
    data = OmegaConf.to_object(composed.data)
    for value in (data.train, data.validation) if not data.dataset_class else ():
        found = parse_data_files(value, "data.train")
        files |= {str(file.local_path) for file in found if file.local_path is not None}
    for file in files:
        path = folder / file
        if file and "://" not in file and path.parts[-2] != "examples":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def shown_commands():
    for block in BLOCKS:
        if not block.language and not block.untested:
            for number, words in enumerate(commands(block), start=1):
                name = f"{block.id}-command_{number}"
                marks = () if block.page == QUICK_PAGE else (pytest.mark.extended,)
                yield pytest.param(block.page, words, id=name, marks=marks)


@pytest.mark.parametrize(("page", "words"), list(shown_commands()))
def test_a_command_is_accepted(page, words, place):
    run_command(words, place(page))


SPANS = [
    pytest.param(page, shlex.split(span), id=f"{Path(page).stem}-{span}")
    for page in PAGES
    for span in dict.fromkeys(code_spans(page))
    if re.match(r"make [a-z]|tools/\w+\.py |\.venv/bin/python |sbatch ", span)
    and "sbatch --signal" not in span
]


@pytest.mark.extended
@pytest.mark.parametrize(("page", "words"), SPANS)
def test_a_command_in_the_text_is_accepted(page, words, place):
    run_command([word for word in words if word != "..."], place(page))


@pytest.mark.parametrize("page", PAGES)
def test_overrides_in_the_text_name_known_keys_and_options(page):
    groups, sections = known_groups(CONFIGS), known_sections()
    for span in code_spans(page):
        for word in span.split():
            key = re.match(r"\+?([a-z_]+(?:\.\w+)*)=", word)
            if key is None or re.search(r"=([A-Z]|\.\.\.|$)|\$", word):
                continue
            if key[1].partition(".")[0] in sections and "." in key[1]:
                check_overrides([re.sub(r"=.*", "=null", word)], CONFIGS)
            elif key[1] in groups:
                check_overrides([word.rstrip(",")], CONFIGS)


SETTINGS = [
    block for block in BLOCKS if block.language == "yaml" and not block.file and not block.untested
]


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.id)
def test_settings_as_yaml_are_accepted(block, place):
    folder = place(block.page)
    experiment = folder / "configs" / "experiment" / "shown.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(f"# @package _global_\n{block.text}")
    check_run(
        ["experiment=shown", "model=hf", "model.path=...", "data.train=...", "rollout=hermes"],
        folder,
        folder / "configs",
    )


ROWS = [
    block
    for block in BLOCKS
    if block.language == "json" and not block.untested and block.file in ("", "train.jsonl")
]


@pytest.mark.parametrize("block", ROWS, ids=lambda block: block.id)
def test_a_row_is_read(block, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(json.loads(block.text)))
    (row,) = read_prompts([DataFile(f"{tmp_path}/rows.jsonl")], DataConfig(), key="data.train")
    assert row.prompt.data_source


def test_every_block_is_of_a_known_kind():
    known = {"", "python", "yaml", "json", "jinja"}
    assert not [block.id for block in BLOCKS if block.language not in known]
    assert all(yaml.safe_load(block.text) for block in BLOCKS if block.language == "yaml")
    assert all(json.loads(block.text) for block in BLOCKS if block.language == "json")
    for block in BLOCKS:
        if block.language == "jinja":
            assert JudgePrompt(block.text).render(make_trajectory())
