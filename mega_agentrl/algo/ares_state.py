"""The state of ARES's controllers (arXiv 2510.08457): one value, kept from step to step.

`AresState` is what a checkpoint holds, as plain numbers, lists and strings; `AresRules` are the
constants of the rule in force and come from the configuration; `AresStats` is what one batch of
training rollouts showed. How the three become the next state is in `ares.update`.

Buckets, in this order everywhere: 0 easy, 1 medium, 2 hard; -1 is a prompt never seen. B
trajectories.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo.ares_reward import NAMES
from mega_agentrl.algo.shapes import check_rank, same_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNKNOWN = -1
RULE_NAMES = ("paper", "released")

Buckets = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AresRules:
    """Constants of the controllers.

    name: `paper`, or `released`, which follows the published code and uses the first four only.
    kl_coef: weight of the KL term where nothing holds it back. alpha_rate, alpha_max: step and
    upper end of alpha. threshold_decay: of its EMA. target_rate: share of a batch in a target.
    lambda_rate: step of the dual ascent on KL. kl_budget: nats per token it allows, by bucket.
    min_trajectories: a bucket with fewer in a batch leaves its controllers alone.
    """

    name: str = "paper"
    kl_coef: float = 0.01
    alpha_rate: float = 0.05
    alpha_max: float = 2.0
    threshold_decay: float = 0.99
    target_rate: float = 0.1
    lambda_rate: float = 0.1
    kl_budget: Buckets = (0.01, 0.02, 0.04)
    min_trajectories: int = 8

    def __post_init__(self) -> None:
        if self.name not in RULE_NAMES:
            raise ValueError(f"name={self.name}: expected one of {', '.join(RULE_NAMES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedKl:
    """The published code's KL controller, by bucket: see `ares_released.update_kl`.

    betas: factors on the KL coefficient. kl_means: EMA of the measured KL in nats, None before
    the first. errors: EMA of the relative error. num_updates: calls so far.
    """

    betas: Buckets = (1.0, 1.0, 1.0)
    kl_means: tuple[float | None, float | None, float | None] = (None, None, None)
    errors: Buckets = (0.0, 0.0, 0.0)
    num_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AresState:
    """Everything ARES knows across steps; tuples are by bucket.

    difficulty: code of every prompt seen, by its stable id. targets: HWE counts to reach, None
    before a bucket was seen. alphas: strength of the shaping. lambdas: dual variables of the KL
    budgets. betas: weight of the KL term; None before the first update, when it is the rules'
    kl_coef. threshold: of the window entropy, in nats; None before the first batch.
    """

    difficulty: Mapping[str, int] = field(default_factory=dict)
    targets: tuple[float | None, float | None, float | None] = (None, None, None)
    alphas: Buckets = (0.5, 0.5, 0.5)
    lambdas: Buckets = (0.0, 0.0, 0.0)
    betas: Buckets | None = None
    threshold: float | None = None
    released_kl: ReleasedKl = field(default_factory=ReleasedKl)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, lists, strings and None only; survives JSON and `from_plain` exactly."""
        plain: dict[str, Any] = _listed(asdict(self))
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> AresState:
        """The state that `to_plain` wrote; raises `ValueError` for other fields."""
        names = set(cls.__dataclass_fields__)
        if set(plain) != names:
            raise ValueError(
                f"ARES state: got the fields {sorted(plain)}, expected {sorted(names)}; "
                "probable cause: a checkpoint of another version"
            )
        values: dict[str, Any] = {name: _tupled(plain[name]) for name in names}
        released = {name: _tupled(value) for name, value in plain["released_kl"].items()}
        return cls(**values | {"released_kl": ReleasedKl(**released)})

    def codes(
        self, prompt_ids: Sequence[str], unseen_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B] int64 difficulty of each trajectory's prompt; for a prompt never seen that of
        `unseen_B`, or -1.
        """
        found = [self.difficulty.get(prompt_id, UNKNOWN) for prompt_id in prompt_ids]
        code_B = torch.tensor(found, dtype=torch.int64)
        if unseen_B is None:
            return code_B
        same_shape(code_B=code_B, unseen_B=unseen_B)
        return torch.where(code_B == UNKNOWN, unseen_B.long(), code_B)

    def target_of(self, code_B: torch.Tensor) -> torch.Tensor:
        """[B] float64 HWE target; NaN where there is none yet."""
        known = [torch.nan if target is None else target for target in self.targets]
        return _pick(known, torch.nan, code_B)

    def alpha_of(self, code_B: torch.Tensor) -> torch.Tensor:
        """[B] float64 strength of the shaping; 0 for a prompt never seen."""
        return _pick(self.alphas, 0.0, code_B)

    def beta_of(self, code_B: torch.Tensor, rules: AresRules) -> torch.Tensor:
        """[B] float64 weight of the KL term; the rules' `kl_coef` for a prompt never seen."""
        return _pick(self.betas or (rules.kl_coef,) * 3, rules.kl_coef, code_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class AresStats:
    """What the training rollouts of a step showed: all their groups, before any filter.

    prompt_ids: of each of B trajectories; equal = one group. correct_B: [B] bool or 0/1. hwe_B:
    [B] windows counted with the threshold from before the step. p95_B: [B] of
    `hwe.threshold_p95`, nats, NaN for none. kl_B: [B] mean KL to the reference per token, nats;
    NaN where it was not measured, None where it was nowhere.
    """

    prompt_ids: tuple[str, ...]
    correct_B: torch.Tensor
    hwe_B: torch.Tensor
    p95_B: torch.Tensor
    kl_B: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_rank(correct_B=self.correct_B)
        given = {"correct_B": self.correct_B, "hwe_B": self.hwe_B, "p95_B": self.p95_B}
        same_shape(**given if self.kl_B is None else given | {"kl_B": self.kl_B})
        if len(self.prompt_ids) != len(self.correct_B):
            raise ValueError(
                f"AresStats: got {len(self.prompt_ids)} prompt_ids and correct_B "
                f"{tuple(self.correct_B.shape)}, expected one id per trajectory"
            )

    def group_B(self) -> torch.Tensor:
        """[B] int64: the prompts numbered from 0, in the order they come."""
        number = {
            prompt_id: index for index, prompt_id in enumerate(dict.fromkeys(self.prompt_ids))
        }
        return torch.tensor([number[prompt_id] for prompt_id in self.prompt_ids])


def bucket_mean(value_B: torch.Tensor, there_B: torch.Tensor) -> float | None:
    """Mean of the chosen values that are no NaN as a plain number; None where there are none."""
    chosen_N = value_B[there_B].double()
    known_N = chosen_N[~chosen_N.isnan()]
    return float(known_N.mean()) if len(known_N) else None


def metrics(
    state: AresState, stats: AresStats, code_B: torch.Tensor, rules: AresRules
) -> dict[str, float]:
    """Per bucket its share of the batch, accuracy, HWE count, KL and controllers.

    code_B: [B] the difficulty each trajectory was treated as. What is not known is left out.
    """
    beta = state.betas or (rules.kl_coef,) * 3
    found: dict[str, float | None] = {"ares/threshold": state.threshold}
    for code, name in enumerate(NAMES):
        there_B = code_B == code
        found |= {
            f"ares/{name}/share": bucket_mean(there_B, torch.ones_like(there_B)),
            f"ares/{name}/accuracy": bucket_mean(stats.correct_B, there_B),
            f"ares/{name}/hwe": bucket_mean(stats.hwe_B, there_B),
            f"ares/{name}/target": state.targets[code],
            f"ares/{name}/alpha": state.alphas[code],
            f"ares/{name}/beta": beta[code],
            f"ares/{name}/lambda": state.lambdas[code],
        }
        if stats.kl_B is not None:
            found[f"ares/{name}/kl"] = bucket_mean(stats.kl_B, there_B)
    return {name: value for name, value in found.items() if value is not None}


def _pick(by_code: Sequence[float], unseen: float, code_B: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*by_code, unseen], dtype=torch.float64)
    return table[torch.where((code_B >= 0) & (code_B < len(by_code)), code_B, len(by_code))]


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
