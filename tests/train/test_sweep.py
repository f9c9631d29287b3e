"""What a sweep leaves: a note by each job, and one table even where a job failed."""

import json
import logging

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from mega_agentrl.config.override_keys import register_schema
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.errors import InputError
from mega_agentrl.train import sweep
from mega_agentrl.train.sweep import (
    SweepCallback,
    compare_run_dirs,
    write_job_file,
    write_sweep_reports,
)


def start(folder, *overrides, params=None):
    """Start a sweep as Hydra does; return the overrides of Hydra's settings in its jobs."""
    hydra = {
        "sweep": {"dir": str(folder)},
        "overrides": {"task": list(overrides), "hydra": []},
        "sweeper": {"params": params},
    }
    config = OmegaConf.create({"hydra": hydra})
    OmegaConf.set_readonly(config.hydra, True)
    SweepCallback().on_multirun_start(config)
    return list(config.hydra.overrides.hydra)


def test_jobs_are_composed_with_the_swept_keys(tmp_path):
    (given,) = start(tmp_path, "algo=grpo,arpo", "optim.lr=1", params={"+seed": "1,2"})
    assert given == "hydra.callbacks.sweep.swept_keys=[algo,seed]"
    sweep._pending_sweep_dirs.clear()


def test_the_loggers_of_an_earlier_job_still_log():
    earlier = logging.getLogger("mega_agentrl.earlier_job")
    register_schema()
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        hydra = compose("train", return_hydra_config=True).hydra
    configure_log(hydra.job_logging, hydra.verbose)  # as Hydra does at the start of a job
    assert not earlier.disabled


def test_a_job_file_has_the_overrides_and_no_earlier_failure(tmp_path):
    write_job_file(tmp_path / "0-a", ["seed=1"], failed="it burnt")
    kept = tmp_path / "0-a" / "sweep_job.json"
    assert json.loads(kept.read_text()) == {"overrides": ["seed=1"], "failed": "it burnt"}
    write_job_file(tmp_path / "0-a", ["seed=1"])
    assert json.loads(kept.read_text())["failed"] == ""


def test_a_sweep_that_ended_badly_has_its_table(tmp_path, capsys):
    write_job_file(tmp_path / "0-a", ["algo=grpo"], failed="it burnt")
    write_job_file(tmp_path / "1-b", ["algo=arpo"])
    start(tmp_path)
    write_sweep_reports()
    said = capsys.readouterr().out
    assert "0-a: failed: it burnt" in said and "1-b: unfinished" in said
    assert (tmp_path / "comparison.md").read_text() in said
    write_sweep_reports()
    assert capsys.readouterr().out == "", "once"


def test_without_a_sweep_no_report_is_printed(capsys):
    assert sweep._pending_sweep_dirs == []
    write_sweep_reports()
    assert capsys.readouterr() == ("", "")


def test_a_sweep_without_a_started_job_prints_one_line(tmp_path, capsys):
    start(tmp_path)
    write_sweep_reports()
    assert "no comparison of the sweep" in capsys.readouterr().err


def test_runs_that_are_named_twice_count_once(tmp_path):
    for name in ("0-a", "1-b"):
        write_job_file(tmp_path / name, ["algo=grpo", f"seed={name[0]}"], failed="x")
    text = compare_run_dirs([tmp_path, tmp_path / "1-b"], tmp_path / "out")
    assert "| 0-a | 0 of 2 |" in text
    with pytest.raises(InputError) as caught:
        compare_run_dirs([tmp_path / "none"], tmp_path)
    assert caught.value.name == str(tmp_path / "none")


def test_the_comparison_of_a_sweep_shows_its_jobs_even_beside_an_earlier_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    for name in ("0-a", "1-b"):
        write_job_file(tmp_path / name, ["algo=grpo", f"seed={name[0]}"])
    start(tmp_path)
    write_sweep_reports()
    shown = capsys.readouterr().out
    assert "0-a: unfinished" in shown and "1-b: unfinished" in shown
    assert f"{tmp_path.name}: unfinished" not in shown
