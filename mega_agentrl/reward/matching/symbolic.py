r"""Symbolic equality of two expressions by math-verify, in a child process.

What the policy writes may keep an algebra system busy for hours or fill the memory. The child
process has a limit of CPU time per question and of memory; a question that exceeds one counts as
not equal, and a child that died is replaced. math-verify's own limits need signals in the main
thread and are off. The child starts at the first question, is used by all threads of this process,
and ends with it.

`is_expression` bounds what is asked at all: no words, no large powers or factorials, no dates or
scores (`2024-05-03`, `3-2`), which an algebra system would subtract. Decimals become fractions, so
nothing is rounded: 0.333 is not 1/3.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import resource
import signal
import threading
from concurrent.futures import CancelledError, Future
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.reward.matching.notation import matching_bracket
from mega_agentrl.reward.matching.units import Unit, parse_unit
from mega_agentrl.reward.matching.words import has_words
from mega_agentrl.sandbox.worker_pool import WorkerCallError, WorkerPool, make_worker_call
from mega_agentrl.types.errors import RewardError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CHARS = 200
"""Length of the longest expression that is compared."""
MAX_CPU_S = 4.0
"""CPU time of one question in the child."""
MAX_MEMORY_BYTES = 2 << 30
"""Address space of the child."""
_TIMEOUT_S = 60.0
"""Time after which a child is replaced that does not notice its limit of CPU time."""
_MODULE = __name__
_start_lock = threading.Lock()
_logger = logging.getLogger(__name__)

_COMMANDS = frozenset(
    "frac binom sqrt pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp "
    "infty alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu "
    "nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi "
    "Psi Omega lfloor rfloor lceil rceil".split()
)
_PLAIN_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|pi"
_PLAIN_FUNCTION = re.compile(
    rf"(?<![a-zA-Z\\])({_PLAIN_FUNCTIONS}|alpha|beta|theta|phi|lambda)(?![a-zA-Z])"
)
_ALLOWED = re.compile(r"(?:\\[a-zA-Z]+|[\w\s+\-*/^!().|{}\[\]])+", re.ASCII)
_DATE_OR_SCORE = re.compile(r"\d[\d ]*(?:-\d+)+")
_AMBIGUOUS = re.compile(r"(?<![\\a-zA-Z_^])[a-zA-Z]\d|\d_|(?<!\\sqrt)\[")
"""x2 may be a product or x_2; 11_2 has a base, and [5] is no product."""
_MATHEMATICAL = re.compile(r"[\d+\-*/^!|\\]|^[a-zA-Z]$")
_COSTLY = re.compile(
    r"\^\{?[-+(]*\d{4}|\^(?:\w+|\\[a-z]+|\{[^{}]*\}?|\([^()]*\)?)\^|\d{3}!|!!|\)!|\}!|\d{60}"
    r"|\^[^()]*\)+\^\{?-?\d\d"
)
_LETTERS = re.compile(r"\\[a-zA-Z]+")
_DECIMAL = re.compile(
    r"(?<![\w.])(\d*)\.(\d+)(?![\w.])|(?<![\w.])(\d+)\.(?!\w)|(\d+)\.(\d+)(?=[a-zA-Z\\])"
)
_UNIT = re.compile(
    r"(.+?)(?: |(?<=[^a-zA-Z\\ ]))((?:(?:square|sq|cubic) )?[a-zA-Z]{2,}(?:\^[23])?|°)"
)
_MIXED_NUMBER = re.compile(r"(?<![\w.}])(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_UPPER_CASE = re.compile(r"(\\?)([A-Z])([a-z]*)(?:_(?:(\w)|\{(\w+)\}))?|\\[a-z]+")


def split_unit(text: str) -> tuple[str, Unit]:
    r"""Return expression and unit of a normalized text such as `5\sqrt{2} cm`."""
    match = _UNIT.fullmatch(text)
    unit = parse_unit(match[2], has_space=True) if match else None
    return (text, Unit()) if match is None or unit is None else (match[1], unit)


def is_expression(text: str) -> bool:
    """Return whether a normalized text is an expression that can be compared at bounded cost."""
    if len(text) > MAX_CHARS or not _ALLOWED.fullmatch(text) or has_words(text):
        return False
    if _AMBIGUOUS.search(text) or not _MATHEMATICAL.search(text):
        return False
    commands = {command[1:] for command in _LETTERS.findall(text)}
    if not commands <= _COMMANDS or _DATE_OR_SCORE.fullmatch(text):
        return False
    return not _COSTLY.search(text.replace(" ", "")) and _is_balanced(text)


def expressions_equal(one: str, other: str) -> bool:
    """Return whether two expressions are equal; runs in the child process."""
    from math_verify import verify
    from sympy import Integer

    first, second = _parse(one), _parse(other)
    if first is None or second is None:
        return False
    # The difference is compared with zero, because math-verify rounds numbers and compares lone
    # symbols by their lower-case names.
    difference = first - second
    return bool(verify([Integer(0)], [difference], timeout_seconds=None))


def submit(function: str, arguments: Mapping[str, Any], grade: float) -> Future[float]:
    """Ask the child process a question, without blocking.

    Args:
        function: "module:name" of a function that returns a bool.
        arguments: its keyword arguments.
        grade: the grade if the function returns false, fails or takes too long; 1 otherwise.

    Returns:
        The future of the grade. It raises `RewardError` if no child process can be started.
    """
    grade_future: Future[float] = Future()
    question = {"function": function, "arguments": dict(arguments)}

    def ask(pool_future: Future[WorkerPool]) -> None:
        try:
            pool = pool_future.result()
            call_future = pool.submit(f"{_MODULE}:answer_within_limits", question)
        except (ValueError, WorkerCallError) as error:
            if grade_future.set_running_or_notify_cancel():
                grade_future.set_exception(RewardError(f"symbolic equality: {error}"))
            return
        grade_future.add_done_callback(lambda future: future.cancelled() and call_future.cancel())
        call_future.add_done_callback(partial(_resolve, grade_future, grade))

    with _start_lock:
        pool_future = _start_pool(os.getpid())
    pool_future.add_done_callback(ask)
    return grade_future


def set_limits() -> None:
    """Limit the memory of this process, and import what questions need; the child's first call."""
    import math_verify  # noqa: F401  its import takes longer than a question

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGVTALRM, _raise_timeout)


def answer_within_limits(function: str, arguments: Mapping[str, Any]) -> bool:
    """Return what a function returns, or false if it fails or takes too long; runs in the child."""
    from mega_agentrl.sandbox.worker_main import load_function

    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        return bool(load_function(function)(**arguments))
    except Exception:  # noqa: BLE001  any error of the algebra system means no proof of equality
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _raise_timeout(number: int, frame: object) -> None:
    raise _OutOfTimeError(number)


class _OutOfTimeError(BaseException):
    """The limit of CPU time is reached; no `except Exception` of a library can hide it."""


@cache
def _start_pool(process_id: int) -> Future[WorkerPool]:
    """Return the future of the pool of this process; a forked process has one of its own.

    A thread starts it, because that takes seconds and the caller may be an event loop.
    """
    warm_up = make_worker_call(f"{_MODULE}:set_limits", {})
    pool = WorkerPool(1, _TIMEOUT_S, warm_up=[warm_up])
    atexit.register(pool.close)
    pool_future: Future[WorkerPool] = Future()

    def start() -> None:
        try:
            pool.start()
        except (ValueError, RuntimeError) as error:  # RuntimeError: this process ends
            pool_future.set_exception(ValueError(str(error)))
        else:
            pool_future.set_result(pool)

    threading.Thread(target=start, name="symbolic", daemon=True).start()
    return pool_future


def _resolve(grade_future: Future[float], grade: float, call_future: Future[Any]) -> None:
    if not grade_future.set_running_or_notify_cancel():
        return
    try:
        is_equal = bool(call_future.result())
    except (WorkerCallError, CancelledError) as error:
        _logger.info("no symbolic equality: %s", error)
        is_equal = False
    grade_future.set_result(1.0 if is_equal else grade)


def _is_balanced(text: str) -> bool:
    position = 0
    while position < len(text):
        if text[position] in "([{":
            position = matching_bracket(text, position)
            if position < 0:
                return False
        elif text[position] in ")]}":
            return False
        position += 1
    return text.count("|") % 2 == 0


def _parse(text: str) -> Any:
    """Return the exact SymPy expression of a normalized text, None if it has none."""
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig, NormalizationConfig
    from sympy import Expr, Float, I, nan, oo, zoo

    literal = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none",
        equations=False,
    )  # fmt: skip
    parsed = parse(
        f"${_to_latex(text)}$",
        extraction_config=[LatexExtractionConfig(normalization_config=literal)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if len(parsed) != 1 or not isinstance(parsed[0], Expr):
        return None
    expression = parsed[0].subs(
        {symbol: I for symbol in parsed[0].free_symbols if symbol.name == "i"}
    )
    return None if expression.has(Float, nan, zoo, oo) else expression


def _to_latex(text: str) -> str:
    """Return the expression in LaTeX, without decimals, and with distinct upper-case letters."""
    text = re.sub(r"(?<![a-zA-Z\\])sqrt\(", r"\\sqrt(", text)
    while (start := text.find("\\sqrt(")) >= 0:
        end = matching_bracket(text, start + 5)
        text = f"{text[:start]}\\sqrt{{{text[start + 6 : end]}}}{text[end + 1 :]}"
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    text = _MIXED_NUMBER.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _DECIMAL.sub(_decimal_to_fraction, text)
    text = _UPPER_CASE.sub(_rename_upper_case, text)
    text = re.sub(r"\\(?:log|lg)(?![a-zA-Z_])", r"\\log_{b_{99}}", text)  # its base is unknown
    text = re.sub(r"(?<=\d)\(", "*(", text)  # else 6(1/2) is read as a mixed number
    return text.replace("*", "\\cdot ")


def _rename_upper_case(match: re.Match[str]) -> str:
    """Return another name for an upper-case symbol; latex2sympy reads n and N as the same."""
    backslash, first, rest, index, indices = match.groups()
    if first is None:
        return match[0]
    return f"{backslash}{first.lower()}{rest}_{{99{index or indices or ''}}}"


def _decimal_to_fraction(match: re.Match[str]) -> str:
    whole = match[1] or match[3] or match[4] or ""
    digits = match[2] or match[5] or ""
    return f"\\frac{{{int(whole + digits or 0)}}}{{{10 ** len(digits)}}}"
