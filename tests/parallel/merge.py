"""Assembly of full tensors from the blocks of all ranks, and relative errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mega_agentrl.types.batch import TrainBatch
    from tests.parallel.policy_jobs import Blocks

TINY_SHARE = 1e-3
"""A tensor whose norm is below this fraction of the norm of all tensors is compared relative to
that fraction: its rounding errors come from larger terms that cancel."""


def assemble(
    ranks: Iterable[Blocks], shapes: Mapping[str, tuple[int, ...]], *, atol: float
) -> dict[str, torch.Tensor]:
    """Assemble full tensors; every element must be present, replicas must agree within atol."""
    whole = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for blocks in ranks:
        for name, rect, value in blocks:
            seen = whole[name][rect.slices]
            known = ~seen.isnan()
            torch.testing.assert_close(
                value[known],
                seen[known],
                rtol=0,
                atol=atol,
                msg=lambda text, name=name: f"replicas of {name}: {text}",
            )
            whole[name][rect.slices] = value
    lacking = [name for name, value in whole.items() if value.isnan().any()]
    assert not lacking, f"held by nobody, or not a number: {lacking}"
    return whole


def scores_by_row(
    ranks: Iterable[tuple[list[int], torch.Tensor, torch.Tensor] | None], batch: TrainBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[B, T]` log-probs and entropies; every row must be answered once."""
    logp_BT, entropy_BT = torch.full((2, *batch.response_BT.shape), math.nan)
    seen = []
    for answer in ranks:
        if answer is not None:
            rows, logp, entropy = answer
            logp_BT[rows], entropy_BT[rows] = logp, entropy
            seen += rows
    assert sorted(seen) == list(range(batch.num_rows))
    return logp_BT, entropy_BT


def relative_errors(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return |got - expected| / |expected| by tensor, with the floor `TINY_SHARE`."""
    assert set(got) == set(expected)
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    floor = TINY_SHARE * math.sqrt(sum(norm**2 for norm in norms.values()))
    return {
        name: float((got[name].double() - value.double()).norm()) / max(norms[name], floor)
        for name, value in expected.items()
    }
