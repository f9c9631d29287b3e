"""Assigns, on the driver, the rows of a batch to data ranks, and selects what each rank is sent.

The scoring pass over the whole batch and each optimizer step are balanced separately, each by the
cost of the rows that it reads (`plan_micro_batches`). So a data rank may train on other rows than
it scores. For an update it is sent only the tokens that it did not already get for scoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mega_agentrl.algo.policy_loss import loss_denominator
from mega_agentrl.batch.micro_batching import InputLengths, plan_micro_batches
from mega_agentrl.batch.packed_rows import PackedRows, PackedTargets
from mega_agentrl.batch.tree_order import shared_between

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch

MicroPlan = tuple[tuple[int, ...], ...]
"""Indices of the rows of each micro-batch of a data rank."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoringShard:
    """What a data rank needs to compute log-probs, values or scores."""

    rows: PackedRows
    """The rows that the data rank scores."""
    micros: MicroPlan
    """Micro-batches, as indices in `rows`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class StepPlan:
    """The share of a data rank in one optimizer step."""

    micros: MicroPlan
    """Micro-batches, as indices in `UpdateShard.row_R`."""
    denominator: float
    """Divisor of the loss, counted over the rows of all data ranks (`loss_denominator`)."""
    cost: float
    """Cost of the micro-batches in tokens (`InputLengths.cost`)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateShard:
    """What a data rank needs for an update, beside the rows that it was sent for scoring."""

    row_R: np.ndarray
    """[R] int64 numbers of the rows that the data rank trains on, in depth-first order."""
    shared_length_R: np.ndarray
    """[R] int64 number of leading tokens that each of these rows shares with the one before it."""
    new_rows: PackedRows
    """The rows of `row_R` that the data rank was not sent for scoring."""
    targets: PackedTargets
    """Mask and targets of the rows `row_R`, in the same order."""
    steps: tuple[StepPlan, ...]
    """The optimizer steps; a step without any trained token is left out."""

    def gather_rows(self, scored: ScoringShard | None) -> PackedRows:
        """Return the rows `row_R`, given what the data rank was sent for scoring."""
        parts = [self.new_rows] if scored is None else [self.new_rows, scored.rows]
        return PackedRows.merge(parts, self.row_R, self.shared_length_R)


@dataclass(slots=True, kw_only=True, frozen=True)
class RowSharder:
    """Assigns rows to data ranks and micro-batches with `plan_micro_batches`."""

    num_data: int
    """Number of data ranks."""
    budget_tokens: int
    """Maximum number of tokens of a micro-batch."""
    num_multiple: int
    """Each data rank gets a multiple of this number of micro-batches."""
    pairs_per_token: float = float("inf")
    """Number of attention scores that cost as much as the rest of the model for one token."""
    max_response_tokens: int | None = None
    """The constant of `algo.loss_aggregation=seq_sum_norm`; None if it is not used."""
    keeps_order: bool = False
    """Whether rows without signal change no sum: micro-batches are planned as if all rows counted,
    and left out where none of their rows does."""

    @classmethod
    def from_config(cls, config: TrainConfig, pairs_per_token: float = float("inf")) -> RowSharder:
        """Return the sharder for the data ranks of a run."""
        parallel = config.parallel
        return cls(
            num_data=parallel.data,
            budget_tokens=config.optim.micro_batch_tokens * parallel.context,
            num_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
            pairs_per_token=pairs_per_token,
            max_response_tokens=config.rollout.max_response_tokens,
            keeps_order=config.deterministic,
        )

    def scoring_shards(
        self, rows: PackedRows, is_scored_B: torch.Tensor | None = None
    ) -> list[ScoringShard]:
        """Return what each data rank needs for a forward pass over the rows of a batch.

        Args:
            rows: All rows of the batch.
            is_scored_B: [B] bool, False for rows to leave out; None to leave out none.
        """
        shards = []
        is_read_R = np.ones(rows.num_rows, dtype=bool)
        for micros in self._plan_pass(rows, is_read_R, is_scored_B):
            indices = sorted(index for micro in micros for index in micro)
            shards.append(
                ScoringShard(rows=rows.take(indices), micros=_local_indices(micros, indices))
            )
        return shards

    def update_shards(
        self,
        batch: TrainBatch,
        step_masks: Iterable[torch.Tensor],
        *,
        rows: PackedRows,
        aggregation: str,
        targets: Sequence[str] = (),
        kl_weight_BT: torch.Tensor | None = None,
        scored: Sequence[ScoringShard] | None = None,
        has_signal_B: torch.Tensor | None = None,
    ) -> list[UpdateShard]:
        """Return what each data rank needs for an update.

        Args:
            batch: The whole batch.
            step_masks: [B, T] bool mask of the trained tokens of each optimizer step; no row has
                trained tokens in two steps.
            rows: All rows of the batch.
            aggregation: Mode of `algo.policy_loss.aggregate`.
            targets: Fields of the batch that the objective reads, such as `POLICY_TARGETS`.
            kl_weight_BT: [B, T] weight of each token's KL term; None for `algo.kl_coef`.
            scored: What each data rank was sent for scoring; None if the batch was not scored.
            has_signal_B: [B] bool, False for rows to leave out, whose loss is 0. They count in the
                denominators, and a step without any other row has an empty micro-batch. None to
                train on all rows.
        """
        lengths = self._input_lengths(rows)
        plans, denominators = [], []
        for mask_BT in step_masks:
            is_trained_R = mask_BT.any(dim=1).numpy()[rows.row_R]
            if is_trained_R.any():
                plans.append(self._plan_pass(rows, is_trained_R, has_signal_B))
                denominator = loss_denominator(
                    mask_BT,
                    aggregation,
                    max_response_tokens=self.max_response_tokens,
                    trajectory_B=batch.trajectory_B,
                )
                denominators.append(denominator.item())
        shards = []
        for data_rank in range(self.num_data):
            rank_plans = [plan[data_rank] for plan in plans]
            rank_indices = sorted(
                index for micros in rank_plans for micro in micros for index in micro
            )
            known_rows = set() if scored is None else set(scored[data_rank].rows.row_R.tolist())
            row_R = rows.row_R[rank_indices]
            steps = tuple(
                StepPlan(
                    micros=_local_indices(micros, rank_indices),
                    denominator=denominator,
                    cost=sum(lengths.cost(list(micro)) for micro in micros),
                )
                for micros, denominator in zip(rank_plans, denominators, strict=True)
            )
            shards.append(
                UpdateShard(
                    row_R=row_R,
                    shared_length_R=shared_between(rows.shared_length_R, rank_indices),
                    new_rows=rows.take(
                        [index for index in rank_indices if rows.row_R[index] not in known_rows]
                    ),
                    targets=PackedTargets.from_batch(batch, row_R, targets, kl_weight_BT),
                    steps=steps,
                )
            )
        return shards

    def num_spared_tokens(
        self, batch: TrainBatch, rows: PackedRows, shards: Sequence[UpdateShard]
    ) -> int:
        """Return the number of tokens that the model would have read in the rows left out.

        Tokens that rows share count once. Arguments as in `update_shards`, and its result.
        """
        lengths = self._input_lengths(rows)
        is_trained_R = batch.mask_BT.any(dim=1).numpy()[rows.row_R]
        is_read_R = np.isin(rows.row_R, np.concatenate([shard.row_R for shard in shards]))
        trained, read = np.flatnonzero(is_trained_R), np.flatnonzero(is_read_R)
        return lengths.num_tokens(trained.tolist()) - lengths.num_tokens(read.tolist())

    def _plan_pass(
        self, rows: PackedRows, is_read_R: np.ndarray, has_signal_B: torch.Tensor | None
    ) -> list[MicroPlan]:
        """Return the micro-batches of each data rank, as indices in `rows`.

        Args:
            rows: All rows of the batch.
            is_read_R: [R] bool, the rows of the pass.
            has_signal_B: [B] bool, False for rows to leave out; None to leave out none.
        """
        lengths = self._input_lengths(rows)
        if has_signal_B is None:
            return self._plan(lengths, np.flatnonzero(is_read_R).tolist())
        has_signal_R = is_read_R & has_signal_B.numpy()[rows.row_R]
        if self.keeps_order:
            plan = self._plan(lengths, np.flatnonzero(is_read_R).tolist())
            return _leave_out(plan, has_signal_R, self.num_multiple)
        if not has_signal_R.any():
            return [((),) * self.num_multiple] * self.num_data
        return self._plan(lengths, np.flatnonzero(has_signal_R).tolist())

    def _input_lengths(self, rows: PackedRows) -> InputLengths:
        return InputLengths(
            length_R=rows.input_length_R,
            shared_length_R=rows.shared_input_length_R,
            pairs_per_token=self.pairs_per_token,
        )

    def _plan(self, lengths: InputLengths, indices: Sequence[int]) -> list[MicroPlan]:
        """Return the micro-batches of each data rank, as indices in the rows of `lengths`."""
        plan = plan_micro_batches(
            lengths.take(indices),
            num_data=self.num_data,
            budget_tokens=self.budget_tokens,
            num_multiple=self.num_multiple,
        )
        return [
            tuple(tuple(indices[index] for index in micro) for micro in micros) for micros in plan
        ]


def load_imbalance(shards: Sequence[UpdateShard]) -> float:
    """Return the cost of the costliest data rank divided by the mean over the data ranks.

    In each optimizer step all ranks wait for the costliest one, so the result is the sum over the
    steps of the largest cost, divided by the mean over the ranks of their total cost. It is at
    least 1, and 1 if there is no step.
    """
    costs = [[step.cost for step in shard.steps] for shard in shards]
    total = sum(map(sum, costs))
    return sum(map(max, zip(*costs, strict=True))) * len(shards) / total if total else 1.0


def _leave_out(
    plan: Sequence[MicroPlan], has_signal_R: np.ndarray, num_multiple: int
) -> list[MicroPlan]:
    """Return a plan without the micro-batches in which no data rank has a row with signal.

    All data ranks keep the same ones, and get empty ones up to a multiple of `num_multiple`.
    """
    kept = [
        position
        for position in range(len(plan[0]))
        if any(has_signal_R[index] for micros in plan for index in micros[position])
    ]
    num_micro = max(1, -(-len(kept) // num_multiple)) * num_multiple
    empty = ((),) * (num_micro - len(kept))
    return [(*(micros[position] for position in kept), *empty) for micros in plan]


def _local_indices(micros: MicroPlan, numbers: Sequence[int]) -> MicroPlan:
    """Return the micro-batches with each row number replaced by its index in `numbers`."""
    index_of = {row: index for index, row in enumerate(numbers)}
    return tuple(tuple(index_of[row] for row in micro) for micro in micros)
