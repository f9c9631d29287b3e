"""Verdicts on the pairs of `tests.reward.matching.answer_table`, which settles who is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mega_agentrl.reward.matching.matcher import match_any
from tests.peers.comparison import Comparison, Reason
from tests.reward.matching.answer_table import TABLE

MAX_CHARS = 2000
"""Longest answer that is compared; peers need minutes for longer ones."""


def _pairs(name: str) -> list[tuple[str, str]]:
    return [pair for kind in TABLE for pair in getattr(kind, name)]


EQUAL, DIFFERENT, UNRECOGNIZED = map(_pairs, ("equal", "different", "unrecognized"))


@cache
def our_verdict(pair: tuple[str, str]) -> bool:
    """Return whether the built-in parts take the answer for equal to the truth."""
    answer, truth = pair
    return match_any(answer, [truth])


AS_IN_THE_TABLE = Reason(
    "a mathematician says what the verdict here is (table in docs/own_reward.md)",
    lambda pair: our_verdict(pair) == (pair in EQUAL),
)
NOT_RECOGNIZED = Reason(
    "equal, but not recognised here (below the table)", lambda pair: pair in UNRECOGNIZED
)


def verdicts(
    function: str, theirs: Callable[[str, str], bool], *, unrecognized: bool = False
) -> Comparison:
    """Return the comparison of a peer's verdicts with ours.

    Args:
        function: The peer's function.
        theirs: Whether it takes an answer for equal to a truth.
        unrecognized: Whether it accepts a pair that is not recognised here.
    """
    pairs = [*EQUAL, *DIFFERENT, *UNRECOGNIZED]
    return Comparison(
        function=f"{function} = matching.matcher",
        inputs=[pair for pair in pairs if max(map(len, pair)) <= MAX_CHARS],
        ours=our_verdict,
        theirs=lambda pair: bool(theirs(*pair)),
        reasons=(NOT_RECOGNIZED, AS_IN_THE_TABLE) if unrecognized else (AS_IN_THE_TABLE,),
    )
