"""What the driver steers by across steps: ARES's controllers, mastered prompts, the KL weight.

`Controllers` is one value: a step takes it and gives the next one, a checkpoint holds it as plain
numbers, lists and strings. It is updated from training rollouts only. How ARES's part moves is in
`ares`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo import kl
from mega_agentrl.algo.ares_state import AresState
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.algo.mastery import Mastery
from mega_agentrl.config.choices import KlPlace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch

KL_HORIZON = 10_000
"""Optimizer steps in which the KL coefficient moves by 20 % at most, as in Ziegler et al. 2019 and
in verl; a run that wants another speed wants another `algo.kl_target`."""

_FIELDS = ("ares", "kl", "mastery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """kl: None where `algo.kl_coef` is the weight throughout."""

    ares: AresState = field(default_factory=AresState)
    mastery: Mastery = field(default_factory=Mastery)
    kl: AdaptiveKL | None = None

    def kl_coef(self, algo: AlgoConfig) -> float:
        """The weight of the KL term now."""
        return algo.kl_coef if self.kl is None else self.kl.coef

    def to_plain(self) -> dict[str, Any]:
        """Numbers, lists, strings and None only; survives JSON and `from_plain` exactly."""
        return {
            "ares": self.ares.to_plain(),
            "mastery": self.mastery.to_plain(),
            "kl": None if self.kl is None else asdict(self.kl),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Controllers:
        """What `to_plain` wrote; raises `ValueError` for other fields."""
        if sorted(plain) != list(_FIELDS):
            raise ValueError(
                f"controllers: got the fields {sorted(plain)}, expected {list(_FIELDS)}; "
                "probable cause: a checkpoint of another version"
            )
        return cls(
            ares=AresState.from_plain(plain["ares"]),
            mastery=Mastery.from_plain(plain["mastery"]),
            kl=None if plain["kl"] is None else AdaptiveKL(**plain["kl"]),
        )


def start(algo: AlgoConfig) -> Controllers:
    """Those of a run's beginning."""
    if algo.kl_target is None:
        return Controllers()
    adaptive = AdaptiveKL(coef=algo.kl_coef, target=algo.kl_target, horizon=KL_HORIZON)
    return Controllers(kl=adaptive)


def kl_after(controllers: Controllers, ref_kl_mean: float, num_optimizer_steps: int) -> Controllers:
    """Those after an update that measured a mean KL to the reference of so many nats a token.

    A KL that is not finite, of a step that was skipped, moves nothing.
    """
    if controllers.kl is None or not isfinite(ref_kl_mean):
        return controllers
    return replace(controllers, kl=kl.update(controllers.kl, ref_kl_mean, num_optimizer_steps))


def loss_kl_weights(
    controllers: Controllers, algo: AlgoConfig, batch: TrainBatch
) -> torch.Tensor | None:
    """[B, T] float32 weight of the loss's KL term where it is adaptive; None: `algo.kl_coef`."""
    if controllers.kl is None or algo.kl_place is not KlPlace.loss:
        return None
    return torch.full(batch.mask_BT.shape, controllers.kl.coef, dtype=torch.float32)
