"""Optional packages are found before a run starts."""

import sys

import pytest

from mega_agentrl.config.checks import report as module
from mega_agentrl.config.checks.report import check_report
from mega_agentrl.config.enums import TrackerName
from mega_agentrl.config.schema import ReportConfig


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_with_the_line_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    report = ReportConfig(trackers=[TrackerName.tensorboard, TrackerName(name)])
    with pytest.raises(ValueError, match=rf"report\.trackers={name}: .*`pip install {name}`"):
        check_report(report)


def test_installed_packages_pass_and_are_not_imported(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    check_report(ReportConfig(trackers=list(TrackerName)))
    assert "mlflow" not in sys.modules


def test_only_requested_trackers_are_looked_for(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: pytest.fail(f"looked for {name}"))
    check_report(ReportConfig())
    check_report(ReportConfig(trackers=[]))
