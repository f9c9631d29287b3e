"""Only code that fails on all calls that were started first ends the run."""

import pytest

from mega_agentrl.types.errors import FirstCallsFailedError, RunStoppedError
from mega_agentrl.types.first_calls import FirstCalls, last_traceback_line


def watched(limit=3):
    return FirstCalls("tool notes", "/code/notes.py", limit)


def test_the_last_of_the_first_calls_raises_with_name_source_and_error():
    first_calls = watched()
    calls = [first_calls.start() for _ in range(3)]
    for call in calls[:2]:
        first_calls.record_failure(call, "KeyError: 'a'", "notes.py:3")
    with pytest.raises(FirstCallsFailedError) as caught:
        first_calls.record_failure(calls[2], "KeyError: 'b'", "notes.py:4")
    error = caught.value
    assert isinstance(error, RunStoppedError)
    assert (error.name, error.source, error.num_calls) == ("tool notes", "/code/notes.py", 3)
    assert (error.error, error.location) == ("KeyError: 'b'", "notes.py:4")


def test_one_success_ends_the_watch():
    first_calls = watched()
    first_calls.record_failure(first_calls.start(), "error", "")
    first_calls.start()
    first_calls.record_success()
    for _ in range(10):
        first_calls.record_failure(first_calls.start(), "error", "")


def test_failures_that_overtake_a_slow_call_wait_for_it():
    first_calls = watched()
    slow = first_calls.start()
    for _ in range(10):
        first_calls.record_failure(first_calls.start(), "fast error", "")
    with pytest.raises(FirstCallsFailedError):
        first_calls.record_failure(slow, "slow error", "")


def test_a_call_without_an_outcome_is_replaced_by_the_next_one():
    first_calls = watched()
    calls = [first_calls.start() for _ in range(4)]
    first_calls.record_no_outcome(calls[1])
    first_calls.record_failure(calls[0], "error", "")
    first_calls.record_failure(calls[2], "error", "")
    with pytest.raises(FirstCallsFailedError):
        first_calls.record_failure(calls[3], "error", "")


def test_a_later_call_without_an_outcome_is_not_replaced():
    first_calls = watched()
    calls = [first_calls.start() for _ in range(5)]
    first_calls.record_no_outcome(calls[3])
    for call in (calls[0], calls[1], calls[3]):
        first_calls.record_failure(call, "error", "")


def test_a_limit_of_zero_watches_nothing():
    first_calls = watched(limit=0)
    for _ in range(10):
        first_calls.record_failure(first_calls.start(), "error", "")


def test_the_last_line_of_a_traceback_names_file_and_function():
    try:
        {}["missing"]
    except KeyError as error:
        line = last_traceback_line(error)
    assert __file__ in line and "test_the_last_line" in line and '{}["missing"]' in line
    assert last_traceback_line(KeyError("never raised")) == ""
