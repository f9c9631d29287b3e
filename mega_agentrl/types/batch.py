"""The training batch: what the driver computes on and what the policy trains on.

Suffixes: B trajectories, T response positions (right-padded to the longest). One typed
record instead of a bag of named tensors; fields that a later phase fills are None before it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import torch


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainBatch:
    """B rows, a trajectory each unless `owner_B` says otherwise; response tensors padded to T.

    prompt_ids: B tuples of prompt token ids, any length.
    response_BT: [B, T] int64 response token ids, 0 where padded.
    length_B: [B] int64 response length, tool tokens included.
    mask_BT: [B, T] bool, True where the policy sampled the token and it may be trained on.
    group_B: [B] int64, equal value = same prompt.
    reward_B: [B] float32. baseline_B: [B] float32 reward of the greedy answer to the prompt, NaN
        where it failed; None where nobody asked for any.
    node_BT: [B, T] int64 id of the tree token; equal id = physically the same token.
    rollout_logp_BT, rollout_entropy_BT: [B, T] float32 from the engine.
    version_BT: [B, T] int64 weight version of each token.
    old_logp_BT, entropy_BT, ref_logp_BT: [B, T] float32 from the actors, else None.
    advantage_BT: [B, T] float32, else None.
    correction_BT: [B, T] float32 weight of each token's policy loss, for what the engine and the
        policy disagree about; None weighs all the same.
    value_BT, return_BT: [B, T] float32 from a critic and of its advantages, else None.
    owner_B: [B] int64 number of the row's trajectory, where some are several rows; else None.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    response_BT: torch.Tensor
    length_B: torch.Tensor
    mask_BT: torch.Tensor
    group_B: torch.Tensor
    reward_B: torch.Tensor
    node_BT: torch.Tensor
    rollout_logp_BT: torch.Tensor
    rollout_entropy_BT: torch.Tensor
    version_BT: torch.Tensor
    old_logp_BT: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    ref_logp_BT: torch.Tensor | None = None
    advantage_BT: torch.Tensor | None = None
    correction_BT: torch.Tensor | None = None
    value_BT: torch.Tensor | None = None
    return_BT: torch.Tensor | None = None
    owner_B: torch.Tensor | None = None
    baseline_B: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.response_BT.ndim != 2:
            raise ValueError(
                f"TrainBatch: response_BT must be [B, T], got shape {tuple(self.response_BT.shape)}"
            )
        num_rows, num_positions = self.response_BT.shape
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            got = (len(value),) if spec.name == "prompt_ids" else tuple(value.shape)
            expected = (num_rows, num_positions) if spec.name.endswith("_BT") else (num_rows,)
            if got != expected:
                raise ValueError(
                    f"TrainBatch: {spec.name} has shape {got}, expected {expected} "
                    f"from response_BT {(num_rows, num_positions)}"
                )

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.prompt_ids)

    def select(self, rows: Sequence[int]) -> Self:
        """The given rows, in the given order; T is kept."""
        picked: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "prompt_ids":
                picked[spec.name] = tuple(self.prompt_ids[row] for row in rows)
            elif value is not None:
                picked[spec.name] = value[list(rows)]
        return replace(self, **picked)

    def with_fields(self, **changes: Any) -> Self:
        """A copy with fields set; shapes are checked again."""
        return replace(self, **changes)


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateStats:
    """What one policy update reports; `metrics` are means over the global batch.

    num_tokens: trained tokens. num_skipped: optimizer steps skipped for non-finite gradients.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_skipped: int
    metrics: Mapping[str, float]
