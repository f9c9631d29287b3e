"""The policy losses that `algo.loss` can name.

A loss is a function of log-probs, old log-probs, advantages and mask that returns the loss of every
token, 0 where masked, and its metrics. The decorator `register_loss` declares its traits
(`LossTraits`), its keyword-only arguments are its options (`algo.loss_options`). Both are read from
the source before a run starts (`config.declarations`), so traits and defaults must be literals. The
formulas are in `algo.policy_loss`.

A loss of your own can stay in your own file: `algo.loss=FILE.py`, see `examples/my_loss.py`. To add
one here:

1. Write the function here and register it. A formula with a use of its own, or published numbers,
   belongs into `algo.policy_loss`.
2. Test hand-worked numbers in `tests/actor/training/test_objectives.py`, and add the formula to
   `whole_objective.py` beside it, which splits of a batch are compared with.
3. Add a preset, `configs/algo/NAME.yaml`, and run `tools/make_config_reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch

from mega_agentrl.algo import policy_loss
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.config.algorithm_traits import LOSSES, LossTraits
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.ranges import Range
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[..., LossResult]
LossFunctionT = TypeVar("LossFunctionT", bound=LossFunction)


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    """A policy loss and its traits."""

    function: LossFunction
    """Function of log-probs, old log-probs, advantages, mask and the options."""
    traits: LossTraits
    """Needs and results of the loss."""

    def __call__(
        self,
        logp_BT: torch.Tensor,
        old_logp_BT: torch.Tensor,
        advantage_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        **options: Any,
    ) -> LossResult:
        """Return the loss, [B, T] and 0 where masked, and its 0-d metrics.

        A loss per trajectory uses the mean advantage over the unmasked tokens of a row.

        Raises:
            ValueError: If the function returns losses of another shape, or other metrics than it
                is registered with.
        """
        advantage = advantage_BT
        if self.traits.per_trajectory:
            advantage = masked_mean(advantage_BT, mask_BT, dim=1)
        loss_BT, info = self.function(logp_BT, old_logp_BT, advantage, mask_BT, **options)
        check_same_shape(loss_BT=loss_BT, mask_BT=mask_BT)
        if set(info) != set(self.traits.metrics):
            expected = f"{list(self.traits.metrics)}, with which the loss is registered"
            raise InputError("metrics", list(info), expected)
        return loss_BT, info


_REGISTERED: dict[str, RegisteredLoss] = {}


def register_loss(
    name: str,
    *,
    metrics: tuple[str, ...],
    per_trajectory: bool = False,
    needs_whole_turns: bool = False,
    needs_whole_rows: bool = False,
    is_zero_without_advantage: bool = False,
) -> Callable[[LossFunctionT], LossFunctionT]:
    """Register the decorated function as the loss `name` with the traits of `LossTraits`."""
    traits = LossTraits(
        metrics=metrics,
        per_trajectory=per_trajectory,
        needs_whole_turns=needs_whole_turns,
        needs_whole_rows=needs_whole_rows,
        is_zero_without_advantage=is_zero_without_advantage,
    )

    def register(function: LossFunctionT) -> LossFunctionT:
        _REGISTERED[name] = RegisteredLoss(function, traits)
        return function

    return register


def find_loss(algo: AlgoConfig) -> RegisteredLoss:
    """Return the loss of `algo.loss`; a user's file is imported on the first call in a process."""
    return load_user_loss(algo.loss) if algo.has_user_loss else _REGISTERED[algo.loss]


@cache
def load_user_loss(reference: str) -> RegisteredLoss:
    """Load a user's loss, `algo.loss=/folder/file.py:function`.

    The driver calls it before anything starts, and every rank of the policy when it is created.

    Raises:
        ConfigError: If there is no such function, or it is not registered.
    """
    function = load_user_object(
        reference, LOSSES.key, LOSSES.expected, default_name=LOSSES.default_name
    )
    records = [record for record in _REGISTERED.values() if record.function is function]
    if not records:
        cause = f"got {function!r}, without the decorator"
        raise ConfigError(LOSSES.key, reference, LOSSES.expected, cause)
    return records[-1]


@register_loss(
    "clipped",
    metrics=("clipfrac", "clipfrac_lower", "approx_kl"),
    is_zero_without_advantage=True,
)
def _clipped(
    *tensors: torch.Tensor,
    clip_low: Annotated[float, Range(above=0, at_most=1)] = 0.2,
    clip_high: Annotated[float, Range(above=0)] = 0.2,
    clip_dual: Annotated[float | None, Range(above=1)] = 3.0,
) -> LossResult:
    """PPO's clipped loss (arXiv 1707.06347).

    Args:
        *tensors: Log-probs, old log-probs, advantages and mask.
        clip_low: Width of the clip range below a ratio of 1.
        clip_high: Width of the clip range above a ratio of 1.
        clip_dual: Dual-clip bound on the loss of negative advantages; null disables it.
    """
    return policy_loss.clipped(
        *tensors, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual
    )


@register_loss(
    "balanced",
    metrics=("clipfrac", "clipfrac_lower", "approx_kl"),
    is_zero_without_advantage=True,
)
def _balanced(
    *tensors: torch.Tensor,
    clip_low: Annotated[float, Range(above=0, at_most=1)] = 0.2,
    clip_high: Annotated[float, Range(above=0)] = 0.2,
    clip_dual: Annotated[float | None, Range(above=1)] = 3.0,
) -> LossResult:
    """AEPO's clipped loss, whose gradient does not vanish above the range (arXiv 2510.14545).

    Args:
        *tensors: Log-probs, old log-probs, advantages and mask.
        clip_low: Width of the clip range below a ratio of 1.
        clip_high: Width of the clip range above a ratio of 1.
        clip_dual: Dual-clip bound on the loss of negative advantages; null disables it.
    """
    return policy_loss.clipped(
        *tensors, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual, balanced=True
    )


@register_loss(
    "gspo",
    metrics=("clipfrac", "approx_kl"),
    per_trajectory=True,
    is_zero_without_advantage=True,
)
def _gspo(
    *tensors: torch.Tensor,
    clip_low: Annotated[float, Range(above=0, at_most=1)] = 0.2,
    clip_high: Annotated[float, Range(above=0)] = 0.2,
) -> LossResult:
    """GSPO's loss, with one ratio per trajectory (arXiv 2507.18071).

    Args:
        *tensors: Log-probs, old log-probs, advantages [B] and mask.
        clip_low: Width of the clip range below a ratio of 1.
        clip_high: Width of the clip range above a ratio of 1.
    """
    return policy_loss.gspo(*tensors, clip_low=clip_low, clip_high=clip_high)


@register_loss("cispo", metrics=("clipfrac", "approx_kl"), is_zero_without_advantage=True)
def _cispo(
    *tensors: torch.Tensor,
    clip_low: Annotated[float, Range(above=0, at_most=1)] = 0.2,
    clip_high: Annotated[float, Range(above=0)] = 0.2,
) -> LossResult:
    """CISPO's loss, whose clipped ratio is a constant weight (arXiv 2506.13585).

    Args:
        *tensors: Log-probs, old log-probs, advantages and mask.
        clip_low: Width of the clip range of the weight below a ratio of 1.
        clip_high: Width of the clip range of the weight above a ratio of 1.
    """
    return policy_loss.cispo(*tensors, clip_low=clip_low, clip_high=clip_high)


@register_loss(
    "atpo",
    metrics=("clipfrac", "approx_kl"),
    needs_whole_turns=True,
    is_zero_without_advantage=True,
)
def _atpo(
    *tensors: torch.Tensor,
    clip_low: Annotated[float, Range(above=0, at_most=1)] = 0.003,
    clip_high: Annotated[float, Range(above=0)] = 0.004,
) -> LossResult:
    """AT2PO's loss, with one ratio per turn (arXiv 2601.04767).

    Args:
        *tensors: Log-probs, old log-probs, advantages and mask.
        clip_low: Width of the clip range below a ratio of 1; the default is the released setting.
        clip_high: Width of the clip range above a ratio of 1; the default is the released setting.
    """
    return policy_loss.atpo(*tensors, clip_low=clip_low, clip_high=clip_high)


@register_loss(
    "future_kl",
    metrics=("clipfrac", "clipfrac_lower", "approx_kl", "future_weight"),
    needs_whole_rows=True,
    is_zero_without_advantage=True,
)
def _future_kl(
    *tensors: torch.Tensor,
    clip_low: Annotated[float, Range(above=0, at_most=1)] = 0.2,
    clip_high: Annotated[float, Range(above=0)] = 0.28,
    clip_dual: Annotated[float, Range(above=1)] = 3.0,
    decay_tokens: Annotated[float, Range(above=0)] = 64.0,
    bound: Annotated[float, Range(at_least=0, at_most=1)] = 0.2,
    high_only: bool = True,
    weight: Annotated[float, Range(at_least=0, at_most=1000)] = 1.0,
    max_penalized_ratio: Annotated[float, Range(at_least=1)] = 6.0,
) -> LossResult:
    """APPO's loss, where a token weighs more if what follows became likelier (arXiv 2606.12384).

    The factor is that of FIPO (arXiv 2603.19835), 1 at the first update of a batch. The defaults
    are the settings of APPO's scripts.

    Args:
        *tensors: Log-probs, old log-probs, advantages and mask.
        clip_low: Width of the clip range below a ratio of 1.
        clip_high: Width of the clip range above a ratio of 1.
        clip_dual: Dual-clip bound on the loss of negative advantages; ratios above it do not count
            in the factor.
        decay_tokens: Number of tokens after which a ratio counts half.
        bound: The factor is between 1 - bound and 1 + bound.
        high_only: Whether the factor is at least 1.
        weight: Weight of the factor: advantages are multiplied by 1 + weight * factor.
        max_penalized_ratio: Ratio above which the factor of a negative advantage is at most 1.
    """
    return policy_loss.future_kl(
        *tensors,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
        gamma=0.5 ** (1 / decay_tokens),
        bound=bound,
        high_only=high_only,
        weight=weight,
        max_penalized_ratio=max_penalized_ratio,
    )
