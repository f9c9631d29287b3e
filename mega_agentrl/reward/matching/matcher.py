r"""Decides whether an answer is equal to the ground truth; all built-in parts use it.

The first of these that applies decides:

1. the same text in one notation (`notation`); words also in another case and without articles
2. two numbers, by their exact values (`numbers`, `units`)
3. structures, item by item (`structures`): tuples, intervals, sets, lists, matrices, relations
4. two expressions, by symbolic equality in a child process (`symbolic`)

Texts in words are `None`: the caller may compare them word by word. All other answers are wrong.
The first three steps take microseconds and run in the caller's thread. `grade_answer` returns a
future only if an answer needs the fourth.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from mega_agentrl.reward.matching import symbolic
from mega_agentrl.reward.matching.notation import MAX_CHARS, matching_bracket, normalize
from mega_agentrl.reward.matching.numbers import parse_quantity, quantities_match
from mega_agentrl.reward.matching.structures import (
    MAX_ITEMS,
    Structure,
    parse_structure,
    split_assignment,
    to_interval,
)
from mega_agentrl.reward.matching.units import Unit
from mega_agentrl.reward.matching.words import has_words, number_aware_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_SYMBOL = re.compile(r"\\?[a-zA-Z]+(?:_\w)?")
_MAX_DEPTH = 6
_MAX_WORD_CHARS = 50_000
_CHOICES = frozenset("ABCD")
"""Letters whose case has no meaning; e and E may be numbers or symbols."""


class _UndecidedError(Exception):
    """The answer depends on the symbolic equality of two expressions."""


def grade_answer(
    answer: str, truths: Sequence[str], compare_words: Callable[[str, str], float]
) -> float | Future[float]:
    """Return the best grade of an answer over several ground truths.

    Args:
        answer: the answer.
        truths: the accepted answers.
        compare_words: grades an answer in words in [0, 1], given the answer and a truth.

    Returns:
        1 if the answer equals a truth, else 0 or the best grade in words. A future of it, if a
        truth and the answer are expressions.
    """
    best, undecided = 0.0, []
    for truth in truths:
        try:
            is_equal = _match_quickly(answer, truth)
        except _UndecidedError:
            undecided.append(truth)
            continue
        best = max(best, compare_words(answer, truth) if is_equal is None else float(is_equal))
        if best == 1:
            return best
    if not undecided:
        return best
    return symbolic.submit(f"{__name__}:match_any", {"answer": answer, "truths": undecided}, best)


def map_grade[ResultT](
    grade: float | Future[float], to_score: Callable[[float], ResultT]
) -> ResultT | Future[ResultT]:
    """Return the score of a grade, or its future if the grade is one."""
    if not isinstance(grade, Future):
        return to_score(grade)
    score_future: Future[ResultT] = Future()
    score_future.add_done_callback(lambda future: future.cancelled() and grade.cancel())

    def resolve(done: Future[float]) -> None:
        if not score_future.set_running_or_notify_cancel():
            return
        if (error := done.exception()) is not None:
            score_future.set_exception(error)
        else:
            score_future.set_result(to_score(done.result()))

    grade.add_done_callback(resolve)
    return score_future


def match_any(answer: str, truths: Sequence[str]) -> bool:
    """Return whether an answer equals one of several truths; runs in the child process."""
    return any(match_answers(answer, truth, symbolic.expressions_equal) for truth in truths)


def match_answers(
    answer: str, truth: str, expressions_equal: Callable[[str, str], bool]
) -> bool | None:
    """Return whether an answer equals a truth, None if they differ and one of them is in words.

    Args:
        answer: the answer.
        truth: the truth.
        expressions_equal: decides for two normalized expressions; may raise to give up.
    """
    if max(len(answer), len(truth)) > MAX_CHARS:
        if answer.strip() == truth.strip():
            return True
        return None if len(answer) <= _MAX_WORD_CHARS and " " in answer else False
    one, other = normalize(answer), normalize(truth)
    if not one or not other:
        return False
    return _Comparison(expressions_equal).compare(one, other)


@lru_cache(maxsize=4096)
def _match_quickly(answer: str, truth: str) -> bool | None:
    return match_answers(answer, truth, _give_up)


def _give_up(one: str, other: str) -> bool:
    raise _UndecidedError(one, other)


class _Comparison:
    """Compares two normalized texts; the verdicts are those of `match_answers`."""

    def __init__(self, expressions_equal: Callable[[str, str], bool]) -> None:
        self._expressions_equal = expressions_equal

    def compare(self, one: str, other: str, depth: int = 0) -> bool | None:
        """Return whether two texts are equal, None if they differ and one is in words."""
        one, other = _unwrap_parentheses(one), _unwrap_parentheses(other)
        if one == other or _are_one_choice(one, other):
            return True
        number, other_number = parse_quantity(one), parse_quantity(other)
        if number is not None and other_number is not None:
            return quantities_match(number, other_number)
        if depth > _MAX_DEPTH:
            return False
        if has_words(one) or has_words(other):
            return self._compare_words(one, other, depth)
        return self._compare_values(one, other, depth)

    def _compare_words(self, one: str, other: str, depth: int) -> bool | None:
        name, value = split_assignment(one)
        other_name, other_value = split_assignment(other)
        if bool(name) != bool(other_name) and not (has_words(value) or has_words(other_value)):
            return self.compare(value, other_value, depth + 1)
        if has_words(one) and has_words(other):
            # Commas have lost the spaces beside them.
            tokens, other_tokens = (
                number_aware_tokens(text.replace(",", ", ")) for text in (one, other)
            )
            return True if tokens == other_tokens else None
        is_abbreviation = one.replace(".", "").lower() == other.replace(".", "").lower()
        return True if is_abbreviation else None

    def _compare_values(self, one: str, other: str, depth: int) -> bool:
        name, value = split_assignment(one)
        other_name, other_value = split_assignment(other)
        if name == other_name != "" or bool(name) != bool(other_name):
            pair = (value, other_value)
            if name == other_name or not any(
                structure is not None and structure.kind == "relation"
                for structure in map(parse_structure, pair)
            ):
                return self.compare(*pair, depth + 1) is True
        structure, other_structure = parse_structure(one), parse_structure(other)
        if structure is not None and other_structure is not None:
            return self._compare_structures(structure, other_structure, depth)
        if structure is not None or other_structure is not None:
            return False
        return self._compare_expressions(one, other)

    def _compare_expressions(self, one: str, other: str) -> bool:
        (one, unit), (other, other_unit) = symbolic.split_unit(one), symbolic.split_unit(other)
        if unit != other_unit and Unit() not in (unit, other_unit):
            return False
        if one == other:
            return True
        are_symbols = _SYMBOL.fullmatch(one) and _SYMBOL.fullmatch(other)
        if are_symbols or not (symbolic.is_expression(one) and symbolic.is_expression(other)):
            return False
        return self._expressions_equal(one, other)

    def _compare_structures(self, one: Structure, other: Structure, depth: int) -> bool:
        if max(len(one.items), len(other.items)) > MAX_ITEMS:
            return False
        kinds = {one.kind, other.kind}
        if kinds == {"relation"}:
            return self._compare_relations(one, other, depth)
        if "relation" in kinds:
            relation, rest = (one, other) if one.kind == "relation" else (other, one)
            return self._compare_with_interval(relation, rest, depth)
        are_relations = _are_relations(one.items) and _are_relations(other.items)
        if one.is_unordered or other.is_unordered or (kinds == {"list"} and are_relations):
            is_comparable = len(kinds) == 1 or _are_lists(kinds, are_relations, one.items)
            return is_comparable and self._contain_each_other(one.items, other.items, depth)
        if one.kind != other.kind or len(one.items) != len(other.items):
            return False
        return self._all_equal(one.items, other.items, depth)

    def _compare_with_interval(self, relation: Structure, rest: Structure, depth: int) -> bool:
        interval = to_interval(relation)
        if not interval:
            return False
        structure = parse_structure(interval)
        return structure is not None and self._compare_structures(structure, rest, depth + 1)

    def _compare_relations(self, one: Structure, other: Structure, depth: int) -> bool:
        if one.operators != other.operators:
            return False
        orders = [other.items]
        if set(one.operators) <= {"=", "!="}:
            orders.append(other.items[::-1])
        if _any_true(partial(self._all_equal, one.items, items, depth) for items in orders):
            return True
        if len(one.items) != 2 or "\\in" in one.operators:
            return False
        difference, other_difference = (
            f"({relation.items[0]})-({relation.items[1]})" for relation in (one, other)
        )
        candidates = [other_difference]
        if one.operators[0] in ("=", "!="):
            candidates.append(f"-({other_difference})")
        return _any_true(
            partial(self._compare_expressions, difference, text) for text in candidates
        )

    def _contain_each_other(self, one: Sequence[str], other: Sequence[str], depth: int) -> bool:
        pairs = [(wanted, other) for wanted in one] + [(wanted, one) for wanted in other]
        return not _any_true(partial(self._lacks, items, wanted, depth) for wanted, items in pairs)

    def _all_equal(self, one: Sequence[str], other: Sequence[str], depth: int) -> bool:
        pairs = zip(one, other, strict=True)
        return not _any_true(partial(self._differ, *pair, depth) for pair in pairs)

    def _lacks(self, items: Sequence[str], wanted: str, depth: int) -> bool:
        """Return whether no item equals the wanted one."""
        if wanted in items:
            return False
        return not _any_true(partial(self._are_equal, item, wanted, depth) for item in items)

    def _are_equal(self, one: str, other: str, depth: int) -> bool:
        return self.compare(one, other, depth + 1) is True

    def _differ(self, one: str, other: str, depth: int) -> bool:
        return not self._are_equal(one, other, depth)


def _any_true(checks: Iterable[Callable[[], bool]]) -> bool:
    """Return whether a check holds; one that holds outweighs those that are undecided."""
    undecided: _UndecidedError | None = None
    for check in checks:
        try:
            if check():
                return True
        except _UndecidedError as error:
            undecided = error
    if undecided is not None:
        raise undecided
    return False


def _unwrap_parentheses(text: str) -> str:
    """Remove parentheses around a single value."""
    for _ in range(_MAX_DEPTH):
        is_wrapped = text[:1] == "(" and matching_bracket(text) == len(text) - 1
        if not is_wrapped or parse_structure(text) is not None:
            break
        text = text[1:-1].strip()
    return text


def _are_one_choice(one: str, other: str) -> bool:
    """Return whether both are the same letter of a multiple choice, such as `(B)` and `b`."""
    letters = {text.strip("() .:").upper() for text in (one, other)}
    return len(letters) == 1 and letters <= _CHOICES


def _are_lists(kinds: set[str], are_relations: bool, items: Sequence[str]) -> bool:
    """Return whether two kinds list values alike: `1, 2` and `1 or 2`, but not `x>1 or y<2`."""
    if kinds == {"union", "alternatives"}:
        return True  # x<1 or x>2, whose relations are compared with intervals
    if are_relations:
        variables = {split_assignment(item)[0] for item in items}
        is_one_variable = len(variables) == 1 and "" not in variables
        return kinds == {"list", "all"} or (kinds == {"list", "alternatives"} and is_one_variable)
    return kinds <= {"set", "all", "list"} or kinds <= {"set", "alternatives", "list"}


def _are_relations(items: Sequence[str]) -> bool:
    structures = map(parse_structure, items)
    return all(item is not None and item.kind == "relation" for item in structures)
