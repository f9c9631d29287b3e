"""The training batch: what the driver computes on and what the policy trains on.

Suffixes: B trajectories, T response positions (right-padded to the longest). One typed
record instead of a bag of named tensors; fields that a later phase fills are None before it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

_INTEGERS = ("response_BT", "length_B", "group_B", "node_BT", "version_BT", "owner_B")


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

    def check(self) -> Self:
        """The batch itself; its shapes were checked when it was made.

        Raises ValueError naming the first field of another dtype, a length beyond the positions,
        a token to train on behind its row's end, or a trajectory (`owner_B`) of two groups.
        """
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name != "prompt_ids" and value is not None:
                _check_dtype(spec.name, value.dtype)
        width, length_B = self.response_BT.size(1), self.length_B
        if bool(((length_B < 0) | (length_B > width)).any()):
            raise ValueError(
                f"TrainBatch: length_B has {length_B.tolist()}, expected 0 to {width}, the width "
                "of response_BT; probable cause: rows of another batch"
            )
        behind_BT = torch.arange(width)[None, :] >= length_B[:, None].cpu()
        if bool((self.mask_BT.cpu() & behind_BT).any()):
            raise ValueError(
                "TrainBatch: mask_BT has tokens to train on behind length_B, expected none in the "
                "padding; probable cause: a mask of another batch"
            )
        if self.owner_B is not None:
            _check_owners(self.owner_B.tolist(), self.group_B.tolist())
        return self

    def select(self, rows: Sequence[int]) -> Self:
        """The given rows, in the given order, as `check` lets them pass; T is kept."""
        picked: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "prompt_ids":
                picked[spec.name] = tuple(self.prompt_ids[row] for row in rows)
            elif value is not None:
                picked[spec.name] = value[list(rows)]
        return replace(self, **picked).check()

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


def _check_dtype(name: str, got: torch.dtype) -> None:
    if name == "mask_BT":
        is_right, expected = got == torch.bool, "torch.bool"
    elif name in _INTEGERS:
        is_right, expected = got == torch.int64, "torch.int64"
    else:
        is_right, expected = got.is_floating_point, "a floating dtype"
    if not is_right:
        raise ValueError(f"TrainBatch: {name} is {got}, expected {expected}")


def _check_owners(owners: Sequence[int], groups: Sequence[int]) -> None:
    group_of: dict[int, int] = {}
    for row, (owner, group) in enumerate(zip(owners, groups, strict=True)):
        if owner < 0 or group_of.setdefault(owner, group) != group:
            raise ValueError(
                f"TrainBatch: owner_B has {owner} in row {row} of group_B {group}, expected "
                f"trajectories numbered from 0, each in one group; it was in group "
                f"{group_of.get(owner)} before"
            )
