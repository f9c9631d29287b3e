"""Rotary embedding settings of a checkpoint's `config.json`.

Both formats are read: `rope_parameters` (which includes theta) and the older `rope_scaling` beside
`rope_theta`. If both are present, `rope_scaling` takes precedence, as in transformers. The actor
computes the frequencies from these settings.

    default  1 / theta^(2i/d)
    linear   the same, divided by factor
    llama3   long wavelengths divided by factor, short ones unchanged, a blend between
    yarn     (arXiv 2309.00071) similar, by number of rotations; cosines and sines are then
             multiplied by attention_factor

A vision-language model has positions along time, height and width (`vision.positions`), and
`mrope_section` says how many of the frequencies turn by which of them.

To add a type: a member of `RopeType`, its keys in `_KNOWN_KEYS` and fields of `RopeConfig`; its
frequencies in `numerics.rotary_frequencies`; a configuration in `tests/tiny_models.py` beside
`YARN_ROPE`, and a row in `test_rope_config.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mega_agentrl.errors import InputError

_KNOWN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "partial_rotary_factor",
}  # fmt: skip


class RopeType(StrEnum):
    """Scaling of the frequencies."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Settings of one rotary embedding; settings that a type ignores keep their neutral value."""

    theta: float
    """Base of the frequencies."""
    rope_type: RopeType = RopeType.default
    factor: float = 1.0
    """Scaling factor (linear, llama3, yarn)."""
    original_max_position_embeddings: int = 0
    """Context length in tokens before scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 1.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only."""
    beta_slow: float = 1.0
    """yarn only."""
    truncate: bool = True
    """Whether the bounds of the ramp are rounded (yarn)."""
    attention_factor: float = 1.0
    """Factor of cosines and sines (yarn)."""
    mrope_section: tuple[int, ...] = ()
    """Number of frequencies that turn by the position along time, height and width; empty for a
    text model, whose tokens have one position."""
    mrope_interleaved: bool = False
    """Whether the axes take turns (T H W T H W ... T T) instead of having a run of frequencies
    each."""

    @classmethod
    def from_vision_config(
        cls, config: dict[str, Any], path: str, *, num_frequencies: int, interleaved: bool
    ) -> RopeConfig:
        """Read the rotary embedding of a vision-language model's decoder.

        Args:
            config: The keys of the decoder.
            path: Path of the file, for error messages.
            num_frequencies: Half of the head dim.
            interleaved: Whether the architecture interleaves the axes.

        Raises:
            ValueError: As `from_config`, and for sections that are missing, do not add up to the
                number of frequencies or are arranged in another way.
        """
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = dict(config.get(key) or {})
        if rope.get("type") == "mrope" or rope.get("rope_type") == "mrope":
            rope |= {"type": "default", "rope_type": "default"}
        section = tuple(rope.pop("mrope_section", None) or ())
        arranged = bool(rope.pop("mrope_interleaved", False))
        if len(section) != 3 or sum(section) != num_frequencies or arranged is not interleaved:
            raise InputError(
                f"{path}, {key}",
                {"mrope_section": list(section), "mrope_interleaved": arranged},
                f"three numbers with the sum {num_frequencies}, and {interleaved}",
                "a config.json of another model family",
            )
        if not (rope.get("rope_theta") or config.get("rope_theta")):
            raise InputError(f"{path}, rope_theta", None, "a number", "a damaged config.json")
        plain = cls.from_config(config | {key: rope}, path)
        return replace(plain, mrope_section=section, mrope_interleaved=interleaved)

    @classmethod
    def from_config(cls, config: dict[str, Any], path: str) -> RopeConfig:
        """Read the rotary embedding of a text model's `config.json`.

        Args:
            config: The parsed file.
            path: Path of the file, for error messages.

        Raises:
            ValueError: For an unsupported type, an unknown or missing key, or a rotary embedding
                of only a part of the head.
        """
        rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        _check_supported(rope, config, path)
        rope_type = RopeType(_rope_type(rope))
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        if rope_type is RopeType.default:
            return cls(theta=theta)
        max_positions = int(_require_rope_key(config, "max_position_embeddings", rope_type, path))
        original = config.get("original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings"
        )
        positions = int(original or max_positions)
        if rope_type is RopeType.yarn and rope.get("factor") is None:
            rope["factor"] = max_positions / positions
        scaled = cls(
            theta=theta,
            rope_type=rope_type,
            factor=float(_require_rope_key(rope, "factor", rope_type, path)),
        )
        if rope_type is RopeType.linear:
            return scaled
        if rope_type is RopeType.llama3:
            return replace(
                scaled,
                original_max_position_embeddings=positions,
                low_freq_factor=float(_require_rope_key(rope, "low_freq_factor", rope_type, path)),
                high_freq_factor=float(
                    _require_rope_key(rope, "high_freq_factor", rope_type, path)
                ),
            )
        return replace(
            scaled,
            original_max_position_embeddings=positions,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_attention_factor(rope, scaled.factor),
        )


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _check_supported(rope: dict[str, Any], config: dict[str, Any], path: str) -> None:
    rope_types = [rope_type.value for rope_type in RopeType]
    if _rope_type(rope) not in rope_types:
        expected = f"one of {', '.join(rope_types)}"
        cause = "a model variant for longer texts than this project can train"
        raise InputError(f"{path}, rope_type", _rope_type(rope), expected, cause)
    unknown = sorted(key for key in set(rope) - _KNOWN_KEYS if rope[key] is not None)
    if unknown:
        cause = "a model whose layers differ in their rotary embedding"
        expected = f"only {sorted(_KNOWN_KEYS)}"
        raise InputError(f"{path}, unknown keys in the rope settings", unknown, expected, cause)
    rotary_factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotary_factor != 1.0:
        name = f"{path}, partial_rotary_factor"
        raise InputError(name, rotary_factor, "1.0", "another model family")


def _require_rope_key(settings: dict[str, Any], key: str, rope_type: RopeType, path: str) -> Any:
    if settings.get(key) is None:
        expected = f"a number for rope_type={rope_type.value} in the rope settings"
        raise InputError(f"{path}, {key}", None, expected, "a damaged config.json")
    return settings[key]


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    # yarn's temperature is 0.1 ln(factor) + 1; some models weight it and divide it by another.
    attention_factor = rope.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, divisor = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(weight) / scale(divisor) if weight and divisor else scale(1.0)
