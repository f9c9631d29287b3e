"""Optional packages are found before anything starts."""

import sys

import pytest

from mega_agentrl.config import check_report as module
from mega_agentrl.config.check_report import check_report
from mega_agentrl.config.choices import TrackerName
from mega_agentrl.config.schema import ReportConfig


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_with_the_line_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(module, "find_spec", lambda asked: None)
    report = ReportConfig(trackers=[TrackerName.tensorboard, TrackerName(name)])
    with pytest.raises(ValueError, match=rf"report\.trackers={name}: .*`pip install {name}`"):
        check_report(report)


def test_what_is_there_passes_and_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda asked: object())
    check_report(ReportConfig(trackers=list(TrackerName)))
    assert "mlflow" not in sys.modules


def test_nobody_looks_for_what_was_not_asked_for(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda asked: pytest.fail(f"looked for {asked}"))
    check_report(ReportConfig())
    check_report(ReportConfig(trackers=[]))
