"""The batch that the driver computes on and the policy trains on.

Shape suffixes: B rows, T response positions (right-padded to the longest response). Fields that a
later phase fills are None before it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.routes import TokenRoutes

_TUPLE_FIELDS = ("prompt_ids", "images_B", "routes_B")
_BOOL_FIELDS = ("mask_BT", "is_scored_B")
_INT64_FIELDS = (
    "response_BT",
    "length_B",
    "group_B",
    "tree_token_BT",
    "version_BT",
    "trajectory_B",
    "tree_order_B",
    "shared_length_B",
)


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainBatch:
    """B rows of response tensors padded to T positions.

    A row is a whole trajectory unless `trajectory_B` is set.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """B tuples of prompt token ids, of any length."""
    response_BT: torch.Tensor
    """[B, T] int64 response token ids, 0 in the padding."""
    length_B: torch.Tensor
    """[B] int64 response lengths, tool tokens included."""
    mask_BT: torch.Tensor
    """[B, T] bool, True for tokens that the policy sampled and that may be trained on."""
    group_B: torch.Tensor
    """[B] int64 group index; rows of the same prompt have equal values."""
    reward_B: torch.Tensor
    """[B] float32 rewards."""
    tree_token_BT: torch.Tensor
    """[B, T] int64 tree-token ids; rows that share a prefix have the same ids there."""
    rollout_logp_BT: torch.Tensor
    """[B, T] float32 sampling log-probs from the engine."""
    rollout_entropy_BT: torch.Tensor
    """[B, T] float32 exact entropies in nats from the engine."""
    version_BT: torch.Tensor
    """[B, T] int64 weight version that sampled each token."""
    old_logp_BT: torch.Tensor | None = None
    """[B, T] float32 log-probs of the policy before the update, 0 in rows that are not scored.
    """
    entropy_BT: torch.Tensor | None = None
    """[B, T] float32 entropies in nats of the policy before the update, 0 in rows that are not
    scored."""
    ref_logp_BT: torch.Tensor | None = None
    """[B, T] float32 log-probs of the reference policy."""
    advantage_BT: torch.Tensor | None = None
    """[B, T] float32 advantages."""
    importance_weight_BT: torch.Tensor | None = None
    """[B, T] float32 weight of each token's policy loss, which corrects for the difference between
    the engine's and the policy's log-probs; None means a weight of 1 everywhere."""
    value_BT: torch.Tensor | None = None
    """[B, T] float32 values from the critic."""
    return_BT: torch.Tensor | None = None
    """[B, T] float32 returns, the critic's targets."""
    trajectory_B: torch.Tensor | None = None
    """[B] int64 index of the trajectory of each row, where a trajectory may be several rows."""
    tree_order_B: torch.Tensor | None = None
    """[B] int64 row numbers in depth-first order of the rollout trees (`batch.tree_order`); None
    if rows share nothing."""
    shared_length_B: torch.Tensor | None = None
    """[B] int64 number of leading tokens, prompt and response, that row `tree_order_B[i]` shares
    with row `tree_order_B[i - 1]`; 0 where a tree begins."""
    images_B: tuple[tuple[PlacedImage, ...], ...] | None = None
    """B tuples of the images of each row with their pixels; starts count the tokens of the row,
    prompt and response. None if no row has any."""
    routes_B: tuple[TokenRoutes | None, ...] | None = None
    """B routes of the first tokens of each row, prompt and response, or None for a row without any;
    None if no row has any."""
    baseline_B: torch.Tensor | None = None
    """[B] float32 reward of the greedy answer to the row's prompt (ReMax), NaN where it failed."""
    is_scored_B: torch.Tensor | None = None
    """[B] bool, False for rows that the policy does not score, because their advantages are 0
    (`train.row_signal`); None if it scores all rows."""

    def __post_init__(self) -> None:
        if self.response_BT.ndim != 2:
            raise InputError("response_BT", tuple(self.response_BT.shape), "a shape [B, T]")
        num_rows, num_positions = self.response_BT.shape
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            got = (len(value),) if spec.name in _TUPLE_FIELDS else tuple(value.shape)
            expected = (num_rows, num_positions) if spec.name.endswith("_BT") else (num_rows,)
            if got != expected:
                shapes = f"shape {expected}, from response_BT {(num_rows, num_positions)}"
                raise InputError(spec.name, got, shapes)

    @property
    def num_rows(self) -> int:
        """Number of rows B."""
        return len(self.prompt_ids)

    def validate(self) -> Self:
        """Check dtypes, lengths, masks and groups, and return the batch itself.

        Shapes are checked on construction.

        Raises:
            ValueError: a field has the wrong dtype, a length exceeds T, the mask is set in the
                padding, or the rows of a trajectory (`trajectory_B`) belong to different groups.
        """
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name not in _TUPLE_FIELDS and value is not None:
                _check_dtype(spec.name, value.dtype)
        width, length_B = self.response_BT.size(1), self.length_B
        if bool(((length_B < 0) | (length_B > width)).any()):
            expected = f"0 to {width}, the width of response_BT"
            raise InputError("length_B", length_B.tolist(), expected, "rows of another batch")
        padding_BT = torch.arange(width)[None, :] >= length_B[:, None].cpu()
        if bool((self.mask_BT.cpu() & padding_BT).any()):
            got, cause = "tokens to train on beyond length_B", "a mask of another batch"
            raise InputError("mask_BT", got, "none in the padding", cause)
        if self.trajectory_B is not None:
            _check_trajectory_groups(self.trajectory_B.tolist(), self.group_B.tolist())
        return self

    def with_fields(self, **changes: Any) -> Self:
        """Return a copy with the given fields replaced; shapes are checked again."""
        return replace(self, **changes)


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateScores:
    """Log-probs and entropies that the first step of an update had before it, 0 elsewhere."""

    logp_BT: torch.Tensor
    """[B, T] float32 log-probs of the trained tokens."""
    entropy_BT: torch.Tensor
    """[B, T] float32 entropies in nats."""
    is_scored_B: torch.Tensor
    """[B] bool, the rows of the first step."""


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateStats:
    """Statistics of one update of the policy or the critic."""

    loss: float
    """Mean loss."""
    grad_norm: float
    """Gradient norm before clipping, mean over the optimizer steps."""
    learning_rate: float
    """Learning rate of the last optimizer step."""
    num_tokens: int
    """Number of tokens trained on."""
    num_skipped_steps: int
    """Number of optimizer steps skipped because of non-finite gradients."""
    metrics: Mapping[str, float]
    """Further metrics, as means over the global batch."""
    scores: UpdateScores | None = None
    """Scores of the batch before the update; None if the policy had scored it in a pass."""


def _check_dtype(name: str, got: torch.dtype) -> None:
    if name in _BOOL_FIELDS:
        is_right, expected = got == torch.bool, "torch.bool"
    elif name in _INT64_FIELDS:
        is_right, expected = got == torch.int64, "torch.int64"
    else:
        is_right, expected = got.is_floating_point, "a floating dtype"
    if not is_right:
        raise InputError(f"dtype of {name}", got, expected)


def _check_trajectory_groups(trajectories: Sequence[int], groups: Sequence[int]) -> None:
    group_of: dict[int, int] = {}
    for row, (trajectory, group) in enumerate(zip(trajectories, groups, strict=True)):
        if trajectory < 0 or group_of.setdefault(trajectory, group) != group:
            expected = (
                "trajectories numbered from 0, each in one group; the row is in group "
                f"{group}, the trajectory was in {group_of.get(trajectory)} before"
            )
            raise InputError(f"trajectory_B, row {row}", trajectory, expected)
