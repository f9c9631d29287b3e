"""Reward functions of the user, run in worker processes.

The user names the function by import path or file, `package.module:compute_score` or
`/folder/file.py:compute_score`; the part after the colon defaults to `compute_score`. The function
is called as

    compute_score(data_source=str, solution_str=str, ground_truth=str | list[str],
                  extra_info=dict)

and returns a number, or a dict whose `score` is the number. The other fields of the dict are dumped
with the trajectory, and become metrics if they are finite numbers. Scalars and arrays of numpy and
torch count as numbers and lists. `find_problem` checks the function in a worker process before a
run starts; every worker process loads the function when the process starts (`warm_up_call`).
"""

from __future__ import annotations

import inspect
import math
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.reward import (
    FUNCTION_ARGUMENTS,
    FUNCTION_EXPECTED,
    FUNCTION_NAME,
)
from mega_agentrl.config.user_code import load_user_object, source_location
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
    from collections.abc import Callable, Mapping

    from mega_agentrl.sandbox.worker_pool import WorkerPool

_MODULE = __name__
FIND_PROBLEM = f"{_MODULE}:find_problem"
"""Name of `find_problem` for a `WorkerPool`."""
_KEY = "reward.functions"


class UserRewardError(RewardError):
    """A user function returned no reward; `__cause__` is the error of the worker pool."""


@dataclass(slots=True, kw_only=True, frozen=True)
class UserRewardResult:
    """The result of a user function."""

    value: float
    """The reward, a finite number."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other fields that the function returned, as plain JSON values."""

    @property
    def metrics(self) -> dict[str, float]:
        """The values in `fields` that are finite numbers or booleans, as floats."""
        return {
            name: float(value)
            for name, value in self.fields.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }


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

    def submit(
        self,
        *,
        data_source: str,
        solution: str,
        ground_truth: str | tuple[str, ...],
        extra_info: Mapping[str, Any],
    ) -> Future[UserRewardResult]:
        """Submit one response for scoring, without blocking.

        Args:
            data_source: the data source of the prompt.
            solution: the decoded response, passed to the function as `solution_str`.
            ground_truth: the true answer, or several.
            extra_info: further columns of the prompt.

        Returns:
            The future of the result. It raises `UserRewardError` if the function raised, timed out,
            crashed or did not return a score, and `FirstCallsFailedError` if the function raised,
            timed out or returned no score in all of its first calls.

        Raises:
            ValueError: `extra_info` cannot be converted to JSON.
        """
        values = (data_source, solution, ground_truth, dict(extra_info))
        call_future = self._pool.submit(
            f"{_MODULE}:run",
            {"path": self._path, "values": dict(zip(FUNCTION_ARGUMENTS, values, strict=True))},
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
        else:
            self._first_calls.record_success()
            result_future.set_result(
                UserRewardResult(value=result["score"], fields=result["fields"])
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
        _load_function(path)
    except ConfigError as error:
        return error.cause
    return ""


def run(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function in this process.

    Returns:
        `score` and `fields`, as `parse_result` returns them.

    Raises:
        ValueError: the function did not return a score. Its own errors pass through.
    """
    function = _load_function(path)
    name = getattr(function, "__name__", path)
    return parse_result(function(**values), f"{name} ({source_location(function)})")


def parse_result(result: object, function: str) -> dict[str, Any]:
    """Return the score and the fields of a user function's result.

    Args:
        result: the value that the function returned.
        function: name and location of the function, for errors.

    Returns:
        A dict of `score`, a finite float, and `fields`, the other fields of a result that is a
        dict.

    Raises:
        ValueError: the result has no finite score, or a field cannot be converted to JSON.
    """
    fields = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in fields:
        raise ValueError(
            f"{function} returned a dict with the keys {list(fields)}, expected a key named score"
        )
    score = _finite_score(fields.pop("score"), function)
    for name, value in fields.items():
        if not isinstance(name, str):
            raise ValueError(  # noqa: TRY004
                f"{function} returned the field {name!r}, expected a name as text"
            )
        try:
            to_json(value)
        except ValueError as error:
            raise ValueError(f"{function} returned the field {name}: {error}") from error
    return {"score": score, "fields": fields}


def _finite_score(value: object, function: str) -> float:
    message = (
        f"{function} returned the score {value!r:.200} of type {type(value).__name__}, expected a "
        "finite number, or a dict with such a number as score"
    )
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if item is not None:
        try:
            value = item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(message) from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(message)
    return float(value)


@cache
def _load_function(path: str) -> Callable[..., object]:
    function = load_user_object(path, _KEY, FUNCTION_EXPECTED, default_name=FUNCTION_NAME)
    if not callable(function):
        raise ConfigError(_KEY, path, FUNCTION_EXPECTED, f"got {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(_KEY, path, FUNCTION_EXPECTED, "got an async function")
    _check_signature(path, function)
    return function  # type: ignore[no-any-return]


def _check_signature(path: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a compiled function may have no signature that can be read
    try:
        signature.bind(**dict.fromkeys(FUNCTION_ARGUMENTS))
    except TypeError as error:
        cause = f"its arguments are {signature}: {error}"
        raise ConfigError(_KEY, path, FUNCTION_EXPECTED, cause) from error


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
