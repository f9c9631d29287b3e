"""The rotary embedding's numbers in a checkpoint's `config.json`.

Reads both spellings: `rope_parameters` (with the base in it) and the older `rope_scaling` beside
`rope_theta`; where both stand, `rope_scaling` counts, as in transformers. The frequencies that
follow from the numbers are the actor's business.

    default  1 / base^(2i/d)
    linear   the same, divided by factor
    llama3   long wavelengths divided by factor, short ones kept, a blend between
    yarn     (arXiv 2309.00071) the like by number of rotations; cosines and sines are then
             multiplied by attention_factor
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

_READ = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "partial_rotary_factor",
}  # fmt: skip


class RopeKind(StrEnum):
    """How the frequencies are scaled."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Numbers of one rotary embedding; those a kind does not name keep their neutral value.

    base: theta. factor: of linear, llama3, yarn. original_positions: tokens the model was first
    trained on (llama3, yarn). low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow,
    truncate (round the bounds of the ramp), attention_factor (of cosines and sines): yarn.
    """

    base: float
    kind: RopeKind = RopeKind.default
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str) -> RopeShape:
        """The rope of a `config.json`. where: its path, for messages.

        Raises `ValueError` for another kind, a key that is unknown or missing, and for a
        rotary embedding of only a part of the head.
        """
        rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        _refuse(rope, config, where)
        kind = RopeKind(_kind(rope))
        base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        if kind is RopeKind.default:
            return cls(base=base)
        max_positions = int(_need(config, "max_position_embeddings", kind, where))
        original = config.get("original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings"
        )
        positions = int(original or max_positions)
        if kind is RopeKind.yarn and rope.get("factor") is None:
            rope["factor"] = max_positions / positions
        plain = cls(base=base, kind=kind, factor=float(_need(rope, "factor", kind, where)))
        if kind is RopeKind.linear:
            return plain
        if kind is RopeKind.llama3:
            return replace(
                plain,
                original_positions=positions,
                low_freq_factor=float(_need(rope, "low_freq_factor", kind, where)),
                high_freq_factor=float(_need(rope, "high_freq_factor", kind, where)),
            )
        return replace(
            plain,
            original_positions=positions,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_attention_factor(rope, plain.factor),
        )


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _refuse(rope: dict[str, Any], config: dict[str, Any], where: str) -> None:
    kinds = [kind.value for kind in RopeKind]
    if _kind(rope) not in kinds:
        raise ValueError(
            f"{where}: rope_type={_kind(rope)!r}, expected one of {', '.join(kinds)}; probable "
            "cause: a model variant for longer texts than this project can train"
        )
    unknown = sorted(key for key in set(rope) - _READ if rope[key] is not None)
    if unknown:
        raise ValueError(
            f"{where}: the rope settings hold {unknown}, expected none but {sorted(_READ)}; "
            "probable cause: a model whose layers differ in their rotary embedding"
        )
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise ValueError(
            f"{where}: partial_rotary_factor={part}, expected 1.0; probable cause: another "
            "model family"
        )


def _need(settings: dict[str, Any], key: str, kind: RopeKind, where: str) -> Any:
    if settings.get(key) is None:
        raise ValueError(
            f"{where}: key {key} is missing in the rope settings, expected a number for "
            f"rope_type={kind.value}; probable cause: a damaged config.json"
        )
    return settings[key]


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    # yarn's temperature: 0.1 ln(factor) + 1, in some models weighed and divided by another.
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, divisor = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(weight) / scale(divisor) if weight and divisor else scale(1.0)
