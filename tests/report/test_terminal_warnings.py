"""Warnings of the driver on the terminal: one line of each kind, no flood."""

import logging

import pytest

from mega_agentrl.report.terminal_warnings import REPEAT_EVERY_S, TerminalWarnings


@pytest.fixture
def log():
    logger = logging.getLogger("mega_agentrl.test_terminal_warnings")
    handler = TerminalWarnings()
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


def test_a_warning_is_one_line_with_its_exception_and_without_a_traceback(log, capsys):
    try:
        {}["table"]
    except KeyError as error:
        log.warning("tool %s:\nfailed", "notes", exc_info=error)
    log.info("a detail")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning: tool notes: failed: KeyError: 'table'"]


def test_many_warnings_of_a_kind_are_shown_once(log, capsys):
    for number in range(100):
        log.warning("trajectory %d failed", number)
    log.warning("another kind")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning: trajectory 0 failed", "warning: another kind"]


def test_the_next_warning_of_a_kind_says_how_many_were_left_out(log, capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for _ in range(100):
        log.warning("a trajectory failed")
    now_s = 2 * REPEAT_EVERY_S
    log.warning("a trajectory failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "warning: a trajectory failed",
        "warning: a trajectory failed (99 more like this since the last one)",
    ]
