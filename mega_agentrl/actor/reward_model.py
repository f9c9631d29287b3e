"""One Megatron rank of a reward model: a frozen sequence classifier with one label.

The score of a row is computed from the hidden state of its last token (prompt and response
concatenated), as in transformers' `...ForSequenceClassification` for a sequence without
padding. There are no gradient buffers and no optimizer.

Arguments and results are plain values or numpy arrays, so that a remote call can carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mega_agentrl.actor.megatron_model import MegatronModel, RankInfo
from mega_agentrl.actor.model.heads import ScalarHead
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_shape import SCALAR_ARCHITECTURES, HeadKind, ModelShape

if TYPE_CHECKING:
    from collections.abc import Set

    from mega_agentrl.batch.packed_rows import PackedScores
    from mega_agentrl.batch.row_sharding import ScoringShard
    from mega_agentrl.config.schema import TrainConfig


class RewardModelRank:
    """This process's shard of the reward model; its weights are undefined until `load_hf`.

    `model_path` is the checkpoint of a sequence classifier with one label; any other
    architecture raises `ValueError`.
    """

    def __init__(self, config: TrainConfig, rank_info: RankInfo, *, model_path: str) -> None:
        shape = ModelShape.from_folder(model_path)
        if shape.head is not HeadKind.scalar:
            raise InputError(
                f"architecture of reward model {model_path}",
                shape.architecture,
                f"one of {', '.join(SCALAR_ARCHITECTURES)}",
                "a policy's folder",
            )
        self.megatron_model = MegatronModel(config, shape, rank_info, is_trainable=False)

    def load_hf(self, folder: str) -> None:
        """Load this rank's slices of a checkpoint of the same shape."""
        self.megatron_model.load_hf(folder)

    def compute_scores(self, shard: ScoringShard) -> PackedScores | None:
        """Compute the raw score of every row.

        Args:
            shard: Rows with one token appended (`PackedRows.with_token_appended`). Packing drops
                the last token of a row, here the appended one; the hidden state that would predict
                it is that of the row's own last token.

        Returns:
            One score per row, `[R]` float32. One rank of the last pipeline stage of each
            data-parallel rank returns them, all others None.
        """
        rows = shard.rows
        # Of each row only the appended token is evaluated.
        select_M = np.zeros(rows.response_start_R1[-1], dtype=bool)
        select_M[rows.response_start_R1[1:] - 1] = True
        head = ScalarHead(num_positions=rows.num_positions)
        return self.megatron_model.forward_only(rows, shard.micros, head, select_M)

    def set_gpu_resident(self, parts: Set[str]) -> None:
        """Keep the weights on the device or in host memory (`Offloader.keep_on_device`)."""
        self.megatron_model.offloader.keep_on_device(parts)

    def close(self) -> None:
        """Destroy the process groups; safe to call twice."""
        self.megatron_model.close()
