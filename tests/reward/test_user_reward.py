"""User reward functions: loading, signature, what they return, and the way through the pool."""

import json
import math
from concurrent.futures import CancelledError
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.user_reward import (
    UserRewardError,
    UserRewardFunction,
    UserRewardResult,
    find_problem,
    parse_result,
    run,
    warm_up_call,
)
from mega_agentrl.sandbox.worker_pool import (
    FunctionFailedError,
    PoolClosedError,
    WorkerLostError,
    WorkerPool,
    WorkerTimeoutError,
)
from mega_agentrl.types.errors import FirstCallsFailedError
from mega_agentrl.types.first_calls import FirstCalls
from tests.config.refusals import refused_input

WAIT_S = 120.0
VALUES = {"data_source": "qa", "solution_str": "four", "ground_truth": "4", "extra_info": {}}
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"

GENERAL = """
import os, time
import beside

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("scoring", solution_str)
    if solution_str == "raise":
        raise KeyError("no such answer")
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        os._exit(9)
    if solution_str == "nan":
        return float("nan")
    right = solution_str == ground_truth or solution_str in ground_truth
    return {"score": beside.WORTH * right, "right": right, "source": data_source,
            "length": len(solution_str), "index": extra_info["index"], "list": ground_truth}
"""


@pytest.fixture
def file(tmp_path):
    """Writes a module and gives its path."""

    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    """Write the general reward function and return its path and name."""
    folder = tmp_path_factory.mktemp("general")
    (folder / "beside.py").write_text("WORTH = 0.5")
    (folder / "mine.py").write_text(GENERAL)
    return f"{folder}/mine.py:compute_score"


@contextmanager
def started(reference, *, num_workers=1, timeout_s=120.0, max_failed_first_calls=0):
    """The reward function over a pool of its own."""
    first_calls = FirstCalls("reward function mine", reference, max_failed_first_calls)
    pool = WorkerPool(num_workers, timeout_s, warm_up=[warm_up_call(reference)])
    pool.start()
    try:
        yield UserRewardFunction(pool, reference, first_calls)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def function(general):
    with started(general, num_workers=2) as made:
        yield made


def ask(function, solution, truth="4", index=0):
    values = {"data_source": "qa", "solution_str": solution, "ground_truth": truth}
    return function.submit(values | {"extra_info": {"index": index}})


def test_scores_come_back_with_their_fields(function):
    futures = [ask(function, str(i), index=i) for i in range(8)]
    scores = [future.result(WAIT_S) for future in futures]
    assert [score.value for score in scores] == [0, 0, 0, 0, 0.5, 0, 0, 0]
    assert [score.fields["index"] for score in scores] == list(range(8))
    assert scores[4].fields["source"] == "qa"


def test_several_ground_truths_arrive_as_a_list(function):
    score = ask(function, "four", ("4", "four")).result(WAIT_S)
    assert score.value == 0.5
    assert score.fields["list"] == ["4", "four"]


@pytest.mark.parametrize(
    ("solution", "cause", "expected"),
    [
        ("raise", FunctionFailedError, "KeyError: 'no such answer'"),
        ("die", WorkerLostError, "scoring die"),
        ("nan", FunctionFailedError, "/mine.py, line 5) returned: got nan,"),
    ],
)
def test_a_failed_call_names_the_function(function, solution, cause, expected):
    with pytest.raises(UserRewardError) as caught:
        ask(function, solution).result(WAIT_S)
    assert "mine.py:compute_score" in str(caught.value)
    error = caught.value.__cause__
    assert isinstance(error, cause) and expected in error.reason + getattr(error, "output", "")
    assert getattr(error, "exit_code", 9) == 9
    assert ask(function, "4").result(WAIT_S).value == 0.5


def test_a_call_that_hangs_ends_at_its_deadline(general):
    with started(general, timeout_s=2.0) as function:
        with pytest.raises(UserRewardError) as caught:
            ask(function, "hang").result(WAIT_S)
    assert isinstance(caught.value.__cause__, WorkerTimeoutError)
    assert caught.value.__cause__.timeout_s == 2.0


def test_a_call_can_be_cancelled_until_it_begins(file):
    with started(file("import time\n" + HEAD + "    time.sleep(600)\n")) as slow:
        first, second = ask(slow, "a"), ask(slow, "b")
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(WAIT_S)
    with pytest.raises(UserRewardError) as caught:
        first.result(WAIT_S)
    assert isinstance(caught.value.__cause__, PoolClosedError)


def test_a_worker_imports_a_file_once(file, tmp_path):
    path = file(f"open('{tmp_path}/notes', 'a').write('x')\n" + HEAD + "    return 1\n")
    with started(path) as function:
        assert [ask(function, "a").result(WAIT_S).value for _ in range(3)] == [1] * 3
    assert (tmp_path / "notes").read_text() == "x"


def test_a_module_may_be_named_with_and_without_a_function(file, monkeypatch, tmp_path):
    (tmp_path / "folder_of_rewards").mkdir()
    file(HEAD + "    return 2\n\ndef other(**values):\n    return 3\n", "folder_of_rewards/some.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("folder_of_rewards.some", VALUES)["score"] == 2
    assert run("folder_of_rewards.some:other", VALUES)["score"] == 3


def test_a_file_may_hold_dataclasses(file):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        "class A:\n    value: float\n" + HEAD + "    return A(1.5).value\n"
    )
    assert run(file(text), VALUES) == {"score": 1.5, "fields": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "the module has no compute_score"),
        ("compute_score = 3\n", "got 3"),
        ("def compute_score(a, b, c, d):\n  return 1\n", "it needs a, b, c, d"),
        (HEAD.replace("info", "info, key") + "  return 1\n", "it needs key"),
    ],
)
def test_the_problem_of_a_wrong_function_is_found(file, text, expected):
    assert expected in find_problem(file(text))


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.ones(()), torch.ones(1), "1",
     Decimal("1.0"), Fraction(1)],
)  # fmt: skip
def test_any_number_is_a_score(value):
    for result in (value, {"score": value}):
        read = parse_result(result, "f")
        assert read == {"score": 1.0, "fields": {}}
        assert type(read["score"]) is float


@pytest.mark.parametrize(
    "value",
    ["one", "nan", math.nan, math.inf, [1.0], 1j, np.ones(2), np.float32("nan"), 10**400,
     Decimal("1e999"), 10**5000, "1" * 200],
    ids=["word", "nan_text", "nan", "inf", "list", "complex", "array", "nan_of_numpy", "large",
         "large_decimal", "unprintable", "long"],
)  # fmt: skip
def test_any_other_value_is_refused(value):
    for result in (value, {"score": value}):
        assert refused_input(parse_result, result, "f").got is value


def test_forms_of_other_trainers_are_scores():
    assert parse_result((1.0, "why"), "f") == {"score": 1.0, "fields": {}}
    assert parse_result(({"score": 1.0, "a": 2}, "why"), "f")["fields"] == {"a": 2}
    assert parse_result({"score": 1, "pred": None}, "f")["fields"] == {"pred": None}
    assert parse_result({"acc": True}, "f") == {"score": 1.0, "fields": {"acc": True}}
    easy = parse_result({"overall": 0.5, "format": 1.0}, "f")
    assert easy == {"score": 0.5, "fields": {"overall": 0.5, "format": 1.0}}
    assert parse_result(None, "f")["score"] is None
    assert parse_result({"score": None, "a": 1}, "f")["score"] is None


@pytest.mark.parametrize(
    "value",
    [int("9" * 400), 10**5000, "x" * 20_000, math.nan, [math.inf], {"a": list(range(9000))},
     np.full(3, np.nan)],
    ids=["long", "unprintable", "text", "nan", "infinity", "object", "array"],
)  # fmt: skip
def test_a_field_that_is_too_large_or_not_finite_is_left_out(value):
    read = parse_result({"score": 1, "pred": value, "a": 2}, "f")
    assert (read["score"], read["fields"]) == (1.0, {"a": 2})
    assert list(read["left_out"]) == ["pred"]


def test_a_field_that_is_left_out_is_logged_once(file, caplog):
    with started(file(HEAD + "    return {'score': 1, 'pred': 10**400}\n")) as function:
        for _ in range(2):
            assert ask(function, "a").result(WAIT_S) == UserRewardResult(value=1.0)
    assert sum("pred" in line.message for line in caplog.records) == 1


def test_a_function_may_give_no_score_now_and_then(file):
    text = HEAD + "    return None if solution_str == 'a' else 1\n"
    with started(file(text), max_failed_first_calls=2) as function:
        scores = [ask(function, solution).result(WAIT_S).value for solution in "babaaa"]
    assert scores == [1, None, 1, None, None, None]


def test_a_dict_without_a_score_or_with_invalid_fields_is_refused():
    assert refused_input(parse_result, {"reward": 1}, "f").got == ["reward"]
    assert refused_input(parse_result, {"score": 1, 3: 1}, "f").got == 3
    error = refused_input(parse_result, {"score": 1, "odd": {1}}, "f")
    assert error.name.startswith("field odd ") and error.got is set


def test_the_dict_of_the_user_is_not_changed():
    given_result = {"score": 1, "a": 2}
    parse_result(given_result, "f")
    assert given_result == {"score": 1, "a": 2}


@given(
    score=st.floats(allow_nan=False, allow_infinity=False),
    fields=st.dictionaries(
        st.text().filter(lambda name: name != "score"),
        st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-9, 9)
        | st.text()
        | st.booleans()
        | st.none(),
    ),
)
def test_finite_fields_survive_json(score, fields):
    read = json.loads(json.dumps(parse_result({"score": score, **fields}, "f")))
    assert read["score"] == score
    assert set(read["fields"]) == set(fields)


FIRST_CALL_CASES = {
    "none": "    return None\n",
    "nan": "    return float('nan')\n",
    "raises": "    return extra_info['missing']\n",
    "too_slow": "    import time\n    time.sleep(600)\n",
}


@pytest.mark.parametrize("case", FIRST_CALL_CASES)
def test_a_function_that_fails_on_all_its_first_calls_ends_the_run(file, case):
    path = file(HEAD + FIRST_CALL_CASES[case])
    timeout_s = 1.0 if case == "too_slow" else 120.0
    with started(path, timeout_s=timeout_s, max_failed_first_calls=2) as function:
        first, second = ask(function, "a"), ask(function, "b")
        if case == "none":  # a row without a score, unless all are
            assert first.result(WAIT_S).value is None
        else:
            with pytest.raises(UserRewardError):
                first.result(WAIT_S)
        with pytest.raises(FirstCallsFailedError) as caught:
            second.result(WAIT_S)
    assert (caught.value.name, caught.value.source) == ("reward function mine", path)
    assert caught.value.num_calls == 2
    if case == "raises":
        assert "KeyError: 'missing'" in caught.value.error
        assert path in caught.value.location
    elif case == "nan":
        assert f"compute_score ({path}, line 1) returned" in caught.value.error
        assert "user_reward.py" not in str(caught.value)


def test_a_function_that_works_sometimes_costs_only_those_calls(general):
    with started(general, max_failed_first_calls=2) as function:
        for _ in range(3):
            with pytest.raises(UserRewardError):
                ask(function, "nan").result(WAIT_S)
            assert ask(function, "4").result(WAIT_S).value == 0.5
