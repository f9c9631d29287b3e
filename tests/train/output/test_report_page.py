"""The report of a run folder, in any state a run may leave it in."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.report.config_diff import complete_settings
from mega_agentrl.report.run_start import RunStart, append_start
from mega_agentrl.rollout.io.tree_file import write_trees
from mega_agentrl.train.output import report_page
from mega_agentrl.train.output.report_page import write_interrupted_report, write_report
from tests.chat_models import save_tokenizer
from tests.rollout.grown_trees import nested_tree


def blocks_of(path):
    found = re.findall(
        r'<script type="application/json" id="([^"]*)">(.*?)</script>', path.read_text()
    )
    return {name: json.loads(text) for name, text in found}


def notes_of(path):
    return path.read_text().split("<footer>")[1].split("</footer>")[0]


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "my_run"
    folder.mkdir()
    lines = [
        {"stage": "rl", "step": step, "rollout/reward_unfiltered": 0.5, "time/rollout_s": 1.0}
        for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    config = OmegaConf.structured(TrainConfig)
    config.optim.lr, config.run_dir = 0.125, str(folder)
    OmegaConf.save(config, folder / "config.yaml")
    trees = [nested_tree(), nested_tree()]
    write_trees(folder / "rollouts/step_000002.jsonl", trees, stage="rl", step=2)
    path = folder / "rollouts/held_out_before.jsonl"
    write_trees(path, trees[:1], stage="held_out_before", step=0)
    return folder


def test_the_page_of_a_run_shows_its_evaluations_and_steps(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    blocks, page = blocks_of(path), path.read_text()
    assert [(file["key"], file["label"]) for file in blocks["tree-index"]["files"]] == [
        ("held_out_before", "held out before (after step 0)"),
        ("step_000002", "RL step 2"),
    ]
    assert len([name for name in blocks if re.fullmatch(r"tree-\d+", name)]) == 3
    assert '<th scope="row">optim.lr</th><td>0.125</td>' in page
    assert "run_dir" not in page
    assert "<h1>my_run</h1>" in page and "learning rate 0.125" in page
    assert not list(run_dir.glob(".report*")) and "tokenizer.json" in notes_of(path)


def test_the_page_says_what_ran(run_dir):
    for host in ("node-1", "node-<2>"):
        start = RunStart(
            time="now",
            host=host,
            pid=4711,
            command="python -m mega_agentrl algo=grpo",
            working_folder="/home/me",
            commits={"/home/me": "0123abc-dirty"},
        )
        append_start(run_dir, start)
    settings = OmegaConf.load(run_dir / "config.yaml")
    filled = complete_settings(OmegaConf.to_container(settings))
    OmegaConf.save(OmegaConf.create(filled), run_dir / "config.yaml")
    page = write_report(run_dir).read_text()
    for name, value in {
        "host": "node-&lt;2&gt;",
        "command": "python -m mega_agentrl algo=grpo",
        "commits./home/me": "0123abc-dirty",
        "number of starts": "2",
        "algo.loss_options.clip_low": "0.2",
    }.items():
        assert f'<th scope="row">{name}</th><td>{value}</td>' in page, name


def test_tokens_have_the_texts_of_the_tokenizer(run_dir):
    model = save_tokenizer("qwen25", run_dir / "model")
    path = write_report(run_dir)
    turn = blocks_of(path)["tree-0"]["paths"][0]["turns"][0]
    own = nested_tree().trajectories[0].token_ids[turn["from"] : turn["to"]]
    assert len(turn["pieces"]) == len(own)
    assert "".join(turn["pieces"]) == HFCodec(model).decode_with_special_tokens(own)
    assert "tokenizer" not in notes_of(path)


def test_advantages_beside_the_trees_are_shown(run_dir):
    beside = run_dir / "rollouts/step_000002.advantages.json"
    beside.write_text(json.dumps({"set_0/0/0.1": -0.75}))
    tree = blocks_of(write_report(run_dir))["tree-1"]
    assert [path["advantage"] for path in tree["paths"]] == [None, None, None, -0.75]
    beside.write_text("[1]")
    assert "step_000002.advantages.json" in notes_of(write_report(run_dir))


def test_trees_beyond_the_budget_are_left_out_with_a_note(run_dir):
    write_trees(run_dir / "rollouts/step_000001.jsonl", [nested_tree()] * 40, stage="rl", step=1)
    path = write_report(run_dir, budget_bytes=60_000)
    blocks = blocks_of(path)
    trees = [name for name in blocks if re.fullmatch(r"tree-\d+", name)]
    sizes = sum(len(json.dumps(blocks[name], separators=(",", ":"))) for name in trees)
    assert 3 <= len(trees) < 43
    assert 30_000 < sizes <= 60_000
    assert f"{len(trees)} of 43" in notes_of(path)
    assert "0 of 43" in notes_of(write_report(run_dir, budget_bytes=0))


def test_of_a_file_that_is_too_large_the_first_part_is_read(run_dir, monkeypatch):
    path = run_dir / "rollouts/step_000001.jsonl"
    write_trees(path, [nested_tree()] * 40, stage="rl", step=1)
    monkeypatch.setattr(report_page, "MAX_TREE_BYTES_READ", path.stat().st_size * 3 // 2)
    index = blocks_of(write_report(run_dir))["tree-index"]
    taken = {file["key"]: [tree["index"] for tree in file["trees"]] for file in index["files"]}
    assert taken["step_000001"] == list(range(20))
    assert taken["step_000002"] == [0, 1]


def test_a_killed_run_has_a_page_with_what_was_written(run_dir, tmp_path):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 3, "roll')
    (run_dir / "config.yaml").unlink()
    text = (run_dir / "rollouts/step_000002.jsonl").read_text()
    (run_dir / "rollouts/step_000002.jsonl").write_text(text[: len(text) * 3 // 4])
    out = tmp_path / "elsewhere/page.html"
    assert write_report(run_dir, out) == out
    # The first of its two trees is whole.
    assert [len(file["trees"]) for file in blocks_of(out)["tree-index"]["files"]] == [1, 1]
    assert "Lines of metrics.jsonl that cannot be read: 1." in notes_of(out)
    assert "step_000002.jsonl:2" in notes_of(out) and "no config.yaml" in out.read_text()


def test_a_run_without_trees_has_a_page(run_dir):
    shutil.rmtree(run_dir / "rollouts")
    page = write_report(run_dir).read_text()
    assert 'id="rollouts"' not in page and "tokenizer" not in page


def test_no_run_is_refused(tmp_path):
    with pytest.raises(report_page.EmptyRunError) as caught:
        write_report(tmp_path)
    assert caught.value.name == str(tmp_path)


@pytest.fixture
def early_dir(tmp_path):
    line = {"stage": "rl", "step": 1, "rollout/reward_unfiltered": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def test_an_interrupted_run_has_a_page(early_dir):
    before = signal.getsignal(signal.SIGALRM)
    assert write_interrupted_report(early_dir, deadline_s=60)
    assert "<html" in (early_dir / "report.html").read_text()
    assert not list(early_dir.glob(".*partial"))
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_interrupted_run_has_a_page_from_another_thread_too(early_dir):
    found = []
    write = lambda: found.append(write_interrupted_report(early_dir, deadline_s=60))  # noqa: E731
    thread = threading.Thread(target=write)
    thread.start()
    thread.join(300)
    assert found == [True] and (early_dir / "report.html").is_file()


def test_a_run_without_a_step_has_no_page_and_a_line_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "report.html").write_text("the one before")
    assert not write_interrupted_report(tmp_path, deadline_s=60)
    assert "no metrics.jsonl" in caplog.text
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert (tmp_path / "report.html").read_text() == "the one before"


@pytest.mark.parametrize("error", [OSError(28, "No space left"), MemoryError(), KeyError("x")])
def test_no_error_of_the_page_is_raised(early_dir, monkeypatch, caplog, error):
    def fails(run_dir, failure):
        raise error

    monkeypatch.setattr(report_page, "write_report", fails)
    assert not write_interrupted_report(Path(early_dir), deadline_s=60)
    assert type(error).__name__ in caplog.text


def test_a_page_that_takes_too_long_is_given_up(early_dir, monkeypatch, caplog):
    def endless(run_dir, failure):
        """Take a minute, in code that gives up at no error."""
        end_s = time.monotonic() + 300
        while time.monotonic() < end_s:
            with suppress(Exception):
                time.sleep(60)

    monkeypatch.setattr(report_page, "write_report", endless)
    assert not write_interrupted_report(early_dir, deadline_s=0.2)
    assert "within 0.2 s" in caplog.text


def test_ctrl_c_ends_the_page_and_nothing_else(early_dir, monkeypatch, caplog):
    def interrupted(run_dir, failure):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(report_page, "write_report", interrupted)
    assert not write_interrupted_report(early_dir, deadline_s=60)
    assert "no report page" in caplog.text
