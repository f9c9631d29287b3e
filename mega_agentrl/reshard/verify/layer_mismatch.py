"""Compares the values of engine and policy at each point of a decoder, in order of computation.

A point is a value of a decoder for each token of a prompt: `embedding`, the points of each layer
(`LAYER_POINTS`), `final_norm` and `log_probs`. The policy computes each half of a layer from the
engine's input (`actor.model.layer_probe`), so that the error of a point is that of the few
operations since, and the first point above its limit names what differs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LAYER_POINTS = (
    "attention_norm",
    "query",
    "key",
    "value",
    "attention",
    "attention_output",
    "mlp_norm",
    "experts",
    "mlp",
)
"""Points of a layer in order; query and key with their norm and the rotary embedding."""

CAUSES = {
    "embedding": "rows of the embedding, or another tokenizer",
    "attention_norm": "weight or epsilon of the norm",
    "query": "the rotary embedding (base, scaling), the norm of queries, or the query projection",
    "key": "the rotary embedding (base, scaling), the norm of keys, or the key projection",
    "value": "the value projection, or heads in another order",
    "attention": "scale or mask of the attention",
    "attention_output": "the output projection",
    "mlp_norm": "weight or epsilon of the norm",
    "experts": "the router: its weight, its dtype, or the number of experts per token",
    "mlp": "weights of the MLP, or of an expert, or the weights that the router gives to experts",
    "final_norm": "weight or epsilon of the norm",
    "log_probs": "the output layer: its weight, or the dtype of its product",
}
"""Usual cause of a difference, by kind of point."""

RELATIVE_LIMITS = {"float32": 1e-5, "bfloat16": 1.5e-2}
"""Largest root mean square of the difference, relative to the engine's, by dtype."""
EXPERTS_LIMIT = 0.05
"""Largest share of tokens with other experts, between which rounding may decide."""
LOG_PROB_LIMIT = 1e-4
"""Largest mean difference of log-probs in nats. Both sides sum the output layer in float32, and the
policy computes it from the engine's hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointError:
    """How far the values of a point are apart."""

    point: str
    """Name of the point, such as `layers.3.key`."""
    error: float
    """Relative error, share of tokens (`experts`), or nats (`log_probs`)."""
    limit: float
    """Largest error that rounding explains."""

    @property
    def kind(self) -> str:
        """The point without its layer."""
        return self.point.rpartition(".")[2]

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain the error."""
        return not self.error <= self.limit


def layer_point(layer: int, point: str) -> str:
    """Return the name of a point of a layer."""
    return f"layers.{layer}.{point}"


def compare_points(
    engine: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray], dtype: str
) -> list[PointError]:
    """Return the errors of the points that both sides have, in order of computation.

    Args:
        engine: The engine's values by point, `[N, ...]` each; the policy may have fewer tokens.
        policy: The policy's values.
        dtype: Dtype of the weights, a key of `RELATIVE_LIMITS`.

    Raises:
        ValueError: The shapes of a point differ, so that the sides have different models.
    """
    errors = []
    for point in sorted(engine.keys() & policy.keys(), key=_order):
        kind = point.rpartition(".")[2]
        if kind in CAUSES:
            got, expected = policy[point], engine[point][: len(policy[point])]
            if got.shape != expected.shape:
                cause = "folders of different models"
                shape = f"{expected.shape}, as the engine has"
                raise InputError(f"{point}, values of the policy", got.shape, shape, cause)
            same_experts = _same_experts(engine, policy, point) if kind == "mlp" else slice(None)
            errors.append(_point_error(point, got[same_experts], expected[same_experts], dtype))
    return errors


def first_difference(errors: Iterable[PointError]) -> PointError | None:
    """Return the first point whose error rounding does not explain."""
    return next((error for error in errors if error.differs), None)


def describe_difference(error: PointError | None) -> str:
    """Return a sentence about `first_difference`."""
    if error is None:
        return "no point differs by more than rounding explains"
    return (
        f"{error.point} is the first point that differs: {error.error:.2g}, expected at most "
        f"{error.limit:.2g}; probable cause: {CAUSES[error.kind]}"
    )


def largest_by_kind(errors: Sequence[PointError]) -> list[PointError]:
    """Return the largest error of each kind of point, in order of computation."""
    largest: dict[str, PointError] = {}
    for error in errors:
        if error.kind not in largest or not error.error <= largest[error.kind].error:
            largest[error.kind] = error
    return list(largest.values())


def _point_error(point: str, got: np.ndarray, expected: np.ndarray, dtype: str) -> PointError:
    kind = point.rpartition(".")[2]
    if kind == "experts":
        differs_N = (np.sort(got) != np.sort(expected)).any(axis=1)
        return PointError(point=point, error=float(differs_N.mean()), limit=EXPERTS_LIMIT)
    difference = got.astype(np.float64) - expected
    if kind == "log_probs":
        error = float(np.abs(difference).mean())
        return PointError(point=point, error=error, limit=LOG_PROB_LIMIT)
    scale = float(np.sqrt(np.square(expected, dtype=np.float64).mean())) or 1.0
    error = float(np.sqrt(np.square(difference).mean())) / scale
    return PointError(point=point, error=error, limit=RELATIVE_LIMITS[dtype])


def _same_experts(
    engine: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray], point: str
) -> np.ndarray | slice:
    """Return which tokens of an MLP went to the same experts."""
    name = point.removesuffix("mlp") + "experts"
    if name not in engine or name not in policy:
        return slice(None)
    got, expected = policy[name], engine[name][: len(policy[name])]
    same_N: np.ndarray = (np.sort(got) == np.sort(expected)).all(axis=1)
    return same_N if same_N.any() else slice(None)


def _order(point: str) -> tuple[int, int, int]:
    """Return the place of a point in the order of computation."""
    ends = ("embedding", "final_norm", "log_probs")
    if (match := re.fullmatch(r"layers\.(\d+)\.(\w+)", point)) is None:
        place = ends.index(point) if point in ends else -1
        return (0 if place <= 0 else 2, place, 0)
    kind = match[2]
    return (1, int(match[1]), LAYER_POINTS.index(kind) if kind in LAYER_POINTS else -1)
