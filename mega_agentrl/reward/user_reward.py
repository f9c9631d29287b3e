"""Reward functions of the user, run in worker processes.

The user names the function by import path or file, `package.module:compute_score` or
`/folder/file.py:compute_score`; the part after the colon defaults to `compute_score`. `user_call`
says in which forms a function may be called. It returns one of

    0.5   True   "0.5"   Decimal("0.5")   a scalar of numpy or torch     the score
    {"score": 0.5, ...}                   the score with further fields; without `score` also
                                          `overall` (EasyR1) or `acc`
    (0.5, ...)                            the score is the first item
    None                                  no score: the row is left out of its group

The other fields of a dict are dumped with the trajectory, and become metrics if they are finite
numbers. Fields that are too large are left out with a line in the log, because the policy may cause
them. `find_problem` checks the function in a worker process before a run starts; every worker
process loads the function when the process starts (`warm_up_call`).
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.reward import FUNCTION_EXPECTED, FUNCTION_NAME
from mega_agentrl.config.user_code import load_user_object, source_location
from mega_agentrl.errors import InputError
from mega_agentrl.reward.user_call import CallFormError, UserCall, make_call
from mega_agentrl.sandbox.worker_main import to_json
from mega_agentrl.sandbox.worker_pool import (
    FunctionFailedError,
    WorkerCall,
    WorkerCallError,
    WorkerTimeoutError,
    make_worker_call,
)
from mega_agentrl.types.errors import FirstCallsFailedError, RewardError
from mega_agentrl.types.first_calls import FirstCalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.sandbox.worker_pool import WorkerPool

_MODULE = __name__
FIND_PROBLEM = f"{_MODULE}:find_problem"
"""Name of `find_problem` for a `WorkerPool`."""
_KEY = "reward.functions"
_SCORE_FIELDS = ("score", "overall", "acc")
_MAX_FIELD_CHARS = 10_000
"""Length of the JSON text of the largest field that is kept."""
_MAX_FIELDS = 100
_MAX_INTEGER = 2**63
_MAX_NUMBER_CHARS = 100
_logger = logging.getLogger(__name__)


class UserRewardError(RewardError):
    """A user function returned no reward; `__cause__` is the error of the worker pool."""


@dataclass(slots=True, kw_only=True, frozen=True)
class UserRewardResult:
    """The result of a user function."""

    value: float | None
    """The reward, a finite number; None if the function gave none to this row."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other fields that the function returned, as plain JSON values."""


class UserRewardFunction:
    """A user function that a worker pool runs; the caller starts and closes the pool.

    Args:
        pool: the worker pool.
        path: the function, as `package.module:name` or `/folder/file.py:name`.
        first_calls: detects that the function fails in all of its first calls; None for no check.
    """

    def __init__(self, pool: WorkerPool, path: str, first_calls: FirstCalls | None = None) -> None:
        self._pool = pool
        self._path = path
        self._first_calls = first_calls or FirstCalls("", path, 0)
        self._left_out: set[str] = set()

    def submit(self, values: Mapping[str, Any]) -> Future[UserRewardResult]:
        """Submit one response for scoring, without blocking.

        Args:
            values: the row as `conversation.row_values` returns it, by name of the arguments.

        Returns:
            The future of the result. It raises `UserRewardError` if the function raised, timed out,
            crashed or did not return a score, and `FirstCallsFailedError` if the function raised,
            timed out or returned no score in all of its first calls.

        Raises:
            ValueError: a value cannot be converted to JSON.
        """
        call_future = self._pool.submit(
            f"{_MODULE}:run", {"path": self._path, "values": dict(values)}
        )
        result_future: Future[UserRewardResult] = Future()
        result_future.add_done_callback(lambda future: future.cancelled() and call_future.cancel())
        call = self._first_calls.start()
        call_future.add_done_callback(partial(self._resolve_future, result_future, call))
        return result_future

    def _resolve_future(
        self, result_future: Future[UserRewardResult], call: int, call_future: Future[Any]
    ) -> None:
        if not result_future.set_running_or_notify_cancel():
            self._first_calls.record_no_outcome(call)
            return
        try:
            result = call_future.result()
        except (WorkerCallError, CancelledError) as error:
            result_future.set_exception(self._to_reward_error(call, error))
            return
        if result["score"] is None:
            # A function that never gives a score lacks a return statement.
            try:
                self._first_calls.record_failure(call, "it returned None", "")
            except FirstCallsFailedError as error:
                result_future.set_exception(error)
                return
        else:
            self._first_calls.record_success()
        self._report_left_out(result.get("left_out", {}))
        result_future.set_result(UserRewardResult(value=result["score"], fields=result["fields"]))

    def _report_left_out(self, left_out: Mapping[str, str]) -> None:
        """Log each field once that was left out of a result."""
        for name, reason in left_out.items():
            if name not in self._left_out and len(self._left_out) < _MAX_FIELDS:
                self._left_out.add(name)
                _logger.warning(
                    "reward function %s: the field %s is left out: %s", self._path, name, reason
                )

    def _to_reward_error(self, call: int, error: Exception) -> Exception:
        """Record the outcome of a failed call; return the error that its future raises."""
        text = str(error).removeprefix(f"{_MODULE}:run: ")
        reward_error = UserRewardError(f"reward function {self._path}: {text}")
        reward_error.__cause__ = error
        if not isinstance(error, FunctionFailedError | WorkerTimeoutError):
            # The worker was lost or the call cancelled, perhaps through no fault of the function.
            self._first_calls.record_no_outcome(call)
            return reward_error
        try:
            self._first_calls.record_failure(call, text, _last_location(error))
        except FirstCallsFailedError as first_calls_error:
            return first_calls_error
        return reward_error


def warm_up_call(path: str) -> WorkerCall:
    """Return a call for `WorkerPool(warm_up=...)` that loads the function in every worker."""
    return make_worker_call(FIND_PROBLEM, {"path": path})


def find_problem(path: str) -> str:
    """Load the function in this process; return why it cannot be used, empty if it can."""
    try:
        _load_call(path)
    except ConfigError as error:
        return error.cause
    return ""


def run(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function in this process.

    Args:
        path: the function.
        values: the row by name of the arguments, of which the function gets those that it takes.

    Returns:
        What `parse_result` returns.

    Raises:
        ValueError: the function did not return a score. Its own errors pass through.
    """
    call = _load_call(path)
    name = getattr(call.function, "__name__", path)
    return parse_result(call.run(values), f"{name} ({source_location(call.function)})")


def parse_result(result: object, function: str) -> dict[str, Any]:
    """Return the score and the fields of a user function's result.

    Args:
        result: the value that the function returned.
        function: name and location of the function, for errors.

    Returns:
        A dict of `score`, a finite float or None, and `fields`, the other fields of a result that
        is a dict. If fields were left out, `left_out` has the reasons by their names.

    Raises:
        InputError: the result has no finite score, or a field cannot be converted to JSON.
    """
    if isinstance(result, tuple) and result:
        result = result[0]
    fields = dict(result) if isinstance(result, dict) else {"score": result}
    name = next((name for name in _SCORE_FIELDS if name in fields), None)
    if name is None:
        raise InputError(
            f"keys of the dict that {function} returned",
            list(fields)[:_MAX_FIELDS],
            f"one named {' or '.join(_SCORE_FIELDS)}",
        )
    score = _finite_score(fields[name], function)
    fields = {key: value for key, value in fields.items() if key != "score"}
    for key, value in fields.items():
        _check_field(key, value, function)
    left_out = {key: reason for key, value in fields.items() if (reason := _excess(value))}
    left_out |= dict.fromkeys(list(fields)[_MAX_FIELDS:], f"one of more than {_MAX_FIELDS} fields")
    kept = {key: value for key, value in fields.items() if key not in left_out}
    return {"score": score, "fields": kept} | ({"left_out": left_out} if left_out else {})


def _check_field(name: object, value: object, function: str) -> None:
    """Raise `InputError` for a field that has no JSON form because of its type."""
    if not isinstance(name, str):
        raise InputError(f"name of a field that {function} returned", name, "a text")
    if isinstance(value, int | float | str | None):
        return
    try:
        to_json(value)
    except ValueError as error:
        if isinstance(error.__cause__, TypeError):
            where = f"field {name} that {function} returned"
            raise InputError(where, type(value), "a JSON value", f"{error}") from error


def _excess(value: object) -> str:
    """Return why a field is not kept; empty if it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is no finite number"
    try:
        text = to_json(value) if not isinstance(value, int) or abs(value) < _MAX_INTEGER else ""
    except ValueError:  # too large, or nested too deeply
        text = ""
    if not text:
        return "it is too large"
    if len(text) > _MAX_FIELD_CHARS:
        return f"it has {len(text)} characters as JSON, more than {_MAX_FIELD_CHARS}"
    is_finite = not any(word in text for word in ("NaN", "Infinity")) or isinstance(value, str)
    return "" if is_finite else "it holds a number that is not finite"


def _finite_score(value: object, function: str) -> float | None:
    """Return a score as a float, None for an abstention; raise `InputError` for other values."""
    if value is None:
        return None
    refusal = InputError(
        f"score that {function} returned",
        value,
        "a finite number, None, or a dict with such a number as score",
        f"its type is {type(value).__name__}",
    )
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    try:
        number = item() if item is not None else value
        is_short = not isinstance(number, str) or len(number) <= _MAX_NUMBER_CHARS
        if is_short and isinstance(number, int | float | Decimal | Fraction | str):
            score = float(number)
            if math.isfinite(score):
                return score
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise refusal from error
    raise refusal


@cache
def _load_call(path: str) -> UserCall:
    function = load_user_object(path, _KEY, FUNCTION_EXPECTED, default_name=FUNCTION_NAME)
    try:
        return make_call(function)
    except CallFormError as error:
        raise ConfigError(_KEY, path, FUNCTION_EXPECTED, str(error)) from error


def _last_location(error: Exception) -> str:
    """Return the last line of the worker's traceback that names a file.

    The result is empty if no line names a file, or if the last one names this module: the error
    then names the user's function itself.
    """
    if not isinstance(error, FunctionFailedError):
        return ""
    lines = [line.strip() for line in error.traceback.splitlines()]
    last_file_line = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return "" if last_file_line.startswith(f'File "{__file__}"') else last_file_line
