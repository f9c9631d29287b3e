"""math-verify's verdicts on whole answers."""

from __future__ import annotations

from collections.abc import Iterator

from math_verify import parse, verify

from tests.peers.answers import verdicts
from tests.peers.comparison import Comparison


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield the comparison; its inputs are a table."""
    yield verdicts(
        "verify(parse(truth), parse(answer)), boxed",
        lambda answer, truth: verify(
            parse(rf"\boxed{{{truth}}}"), parse(rf"\boxed{{{answer}}}"), timeout_seconds=5
        ),
        unrecognized=True,
    )
