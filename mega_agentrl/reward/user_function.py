"""Rewards by a function of the user's own, run in worker processes.

The function is named by import path or file, `package.module:compute_score` or
`/folder/file.py:compute_score`; without `:name` it is `compute_score`. It is called as

    compute_score(data_source=str, solution_str=str, ground_truth=str | list[str],
                  extra_info=dict)

and returns a number, or a dict whose `score` is the number; the other fields travel along, into
the dump as they are and into the metrics where they are finite numbers. Scalars and arrays of
numpy and torch count as numbers and lists.

`warm_up` loads and checks the function as each worker starts. Does not decide which function
scores which data source, nor what a reward is worth that could not be had.
"""

from __future__ import annotations

import inspect
import math
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.worker_program import to_json
from mega_agentrl.sandbox.workers import Call, WorkerCallError, new_call
from mega_agentrl.types.faults import RewardFault
from mega_agentrl.types.own_code import find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.sandbox.workers import WorkerPool

DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_HERE = __name__


class UserFunctionError(RewardFault):
    """A reward that could not be had; `__cause__` is the pool's typed error."""


@dataclass(slots=True, kw_only=True, frozen=True)
class UserScore:
    """What the function gave. value: the reward, finite. fields: the rest, as JSON has it."""

    value: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The fields that are finite numbers; true is 1 and false is 0."""
        return {
            name: float(value)
            for name, value in self.fields.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }


class UserFunction:
    """One function of the user's, behind a pool that the caller starts and closes."""

    def __init__(self, pool: WorkerPool, path: str) -> None:
        self._pool = pool
        self._path = path

    def submit(
        self,
        *,
        data_source: str,
        solution: str,
        ground_truth: str | tuple[str, ...],
        extra_info: Mapping[str, Any],
    ) -> Future[UserScore]:
        """Score one response; does not wait.

        The future raises `UserFunctionError` where the function raised, hung, died or gave what
        is no score. Raises `ValueError` for an `extra_info` that has no JSON form, and what
        `WorkerPool.submit` raises.
        """
        values = (data_source, solution, ground_truth, dict(extra_info))
        asked = self._pool.submit(
            f"{_HERE}:run",
            {"path": self._path, "values": dict(zip(ARGUMENTS, values, strict=True))},
        )
        scored: Future[UserScore] = Future()
        scored.add_done_callback(lambda future: future.cancelled() and asked.cancel())
        asked.add_done_callback(partial(_hand_on, self._path, scored))
        return scored


def warm_up(path: str) -> Call:
    """For `WorkerPool(warm_up=...)`: start then fails where `check` would."""
    return new_call(f"{_HERE}:check", {"path": path})


def check(path: str) -> None:
    """Load the function here; raises `ValueError` naming it, what is wrong and what is expected."""
    _load(path)


def run(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function here. `score` and `fields`; raises whatever the function raises, and
    `ValueError` for a result that is no score."""
    return read_result(path, _load(path)(**values))


def read_result(path: str, result: object) -> dict[str, Any]:
    """`score` (a finite float) and `fields`; raises `ValueError` for anything else."""
    fields = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in fields:
        raise ValueError(
            f"reward function {path}: returned a dict with the keys {list(fields)}, expected one "
            "named score"
        )
    score = _number(path, fields.pop("score"))
    for name, value in fields.items():
        if not isinstance(name, str):
            raise ValueError(f"reward function {path}: field {name!r}, expected a name as text")  # noqa: TRY004
        try:
            to_json(value)
        except ValueError as error:
            raise ValueError(f"reward function {path}: field {name}: {error}") from error
    return {"score": score, "fields": fields}


def _number(path: str, value: object) -> float:
    wrong = f"reward function {path}: returned the score {value!r:.200} of type "
    wrong += f"{type(value).__name__}, expected a finite number, or a dict with one named score"
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if item is not None:
        try:
            value = item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(wrong) from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(wrong)
    return float(value)


@cache
def _load(path: str) -> Callable[..., object]:
    name, function = find(path, f"reward function {path}", DEFAULT_NAME)
    if not callable(function):
        place = path.removesuffix(f":{name}")
        raise ValueError(  # noqa: TRY004
            f"reward function {path}: {place} has no function {name}, got {function!r}, expected "
            f"{_expected(name)}"
        )
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward function {path}: got an async function, expected a plain one")
    _check_signature(path, name, function)
    return function  # type: ignore[no-any-return]


def _check_signature(path: str, name: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a compiled function may have none to read
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ValueError(
            f"reward function {path}: got {name}{signature}, expected {_expected(name)}, called "
            f"with these names; {error}"
        ) from error


def _expected(name: str) -> str:
    return f"{name}({', '.join(ARGUMENTS)})"


def _hand_on(path: str, scored: Future[UserScore], asked: Future[Any]) -> None:
    if not scored.set_running_or_notify_cancel():
        return
    try:
        result = asked.result()
    except (WorkerCallError, CancelledError) as error:
        text = str(error).removeprefix(f"{_HERE}:run: ")
        wrong = UserFunctionError(f"reward function {path}: {text}")
        wrong.__cause__ = error
        scored.set_exception(wrong)
    else:
        scored.set_result(UserScore(value=result["score"], fields=result["fields"]))
