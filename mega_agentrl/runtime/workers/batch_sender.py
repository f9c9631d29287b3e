"""Sends batches to the ranks of a model: each data rank gets its own trees, a row once per step.

A data rank receives one object in Ray's object store, which the ranks of a machine share. The rows
that were sent for scoring stay there until the update, which refers to them and adds the targets
and the rows that the data rank has not scored. `batch.row_sharding` assigns rows to data ranks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.batch.micro_batching import minibatch_masks
from mega_agentrl.batch.packed_rows import PackedRows, check_placeholders
from mega_agentrl.batch.row_sharding import RowSharder, load_imbalance
from mega_agentrl.config.enums import LossAggregation
from mega_agentrl.estimate.flops import pairs_per_token
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.vision.processor import find_image_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from mega_agentrl.batch.row_sharding import ScoringShard
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredBatch:
    """A batch whose rows were sent to the ranks for scoring."""

    response: weakref.ref[torch.Tensor]
    """The batch's `response_BT`, which all later versions of the batch share."""
    rows: PackedRows
    shards: list[ScoringShard]
    refs: list[Any]
    """Object refs of the shards."""


class BatchSender:
    """Sends batches to the ranks of one model; `put` stores an object and returns a reference."""

    def __init__(self, config: TrainConfig, put: Callable[[Any], Any] = ray.put) -> None:
        self._config = config
        self._put = put
        self._scored_batch: _ScoredBatch | None = None
        self.load_imbalance = 1.0
        """Cost of the costliest data rank in the last update over the mean (`load_imbalance`)."""
        self.num_spared_tokens = 0
        """Tokens that the last update left out (`RowSharder.num_spared_tokens`)."""

    @cached_property
    def _sharder(self) -> RowSharder:
        shape = ModelShape.from_folder(self._config.model.path)
        return RowSharder.from_config(self._config, pairs_per_token(shape))

    def send_for_scoring(self, batch: TrainBatch) -> list[tuple[Any]]:
        """Return for each data rank the reference to its `ScoringShard`, rows of `is_scored_B`."""
        rows = self._pack(batch)
        shards = self._sharder.scoring_shards(rows, batch.is_scored_B)
        refs = [self._put(shard) for shard in shards]
        self._scored_batch = _ScoredBatch(
            response=weakref.ref(batch.response_BT), rows=rows, shards=shards, refs=refs
        )
        return [(ref,) for ref in refs]

    def send_last_tokens(self, batch: TrainBatch) -> list[tuple[Any]]:
        """Like `send_for_scoring`, for scores that are read at the last token of each row."""
        rows = self._pack(batch).with_token_appended()
        return [(self._put(shard),) for shard in self._sharder.scoring_shards(rows)]

    def send_for_update(
        self,
        batch: TrainBatch,
        targets: Sequence[str],
        aggregation: str,
        kl_weight_BT: torch.Tensor | None = None,
        has_signal_B: torch.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Return for each data rank the references to its `UpdateShard` and `ScoringShard`.

        The reference to the `ScoringShard` is None if this batch was not scored. It serves one
        update; another update of the batch sends all rows again.
        """
        scored, self._scored_batch = self._scored_batch, None
        if scored is not None and (
            scored.response() is not batch.response_BT
            # The ranks have not seen routes that they have recorded since.
            or (scored.rows.routes is None and batch.routes_B is not None)
        ):
            scored = None
        rows = self._pack(batch) if scored is None else scored.rows
        shards = self._sharder.update_shards(
            batch,
            minibatch_masks(batch, self._config.optim.num_minibatches),
            rows=rows,
            aggregation=aggregation,
            targets=targets,
            kl_weight_BT=kl_weight_BT,
            scored=None if scored is None else scored.shards,
            has_signal_B=has_signal_B,
        )
        self.load_imbalance = load_imbalance(shards)
        self.num_spared_tokens = self._sharder.num_spared_tokens(batch, rows, shards)
        refs = [None] * len(shards) if scored is None else scored.refs
        return [(self._put(shard), ref) for shard, ref in zip(shards, refs, strict=True)]

    def send_demonstrations(self, batch: TrainBatch) -> list[tuple[Any]]:
        """Return for each data rank the reference to its `UpdateShard` of a supervised step."""
        shards = self._sharder.update_shards(
            batch,
            [batch.mask_BT],
            rows=self._pack(batch),
            aggregation=str(LossAggregation.token_mean),
        )
        return [(self._put(shard),) for shard in shards]

    @cached_property
    def _placeholder_id(self) -> int | None:
        """Token id of a placeholder of images; None for a text model."""
        tokens = find_image_tokens(self._config.model.path)
        return None if tokens is None else tokens.image_id

    def _pack(self, batch: TrainBatch) -> PackedRows:
        if self._placeholder_id is not None:
            check_placeholders(batch, self._placeholder_id)
        return PackedRows.from_batch(batch, share=self._config.batch.trees)
