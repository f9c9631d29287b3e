"""One Megatron rank of a reward model: a frozen sequence classifier with one label.

The score of a row is computed from the hidden state of its last token (prompt and response
concatenated), as in transformers' `...ForSequenceClassification` for a sequence without
padding. There are no gradient buffers and no optimizer.

Arguments and results are plain values or CPU tensors, so that a remote call can carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.megatron_model import MegatronModel, RankInfo
from mega_agentrl.actor.model.heads import ScalarHead
from mega_agentrl.batch.packing import pad_response_length
from mega_agentrl.reshard.mapping.model_shape import SCALAR_ARCHITECTURES, HeadKind, ModelShape

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch


class RewardModelRank:
    """This process's shard of the reward model; its weights are undefined until `load_hf`.

    `model_path` is the checkpoint of a sequence classifier with one label; any other
    architecture raises `ValueError`.
    """

    def __init__(self, config: TrainConfig, rank_info: RankInfo, *, model_path: str) -> None:
        shape = ModelShape.from_folder(model_path)
        if shape.head is not HeadKind.scalar:
            raise ValueError(
                f"reward model {model_path}: got architecture {shape.architecture}, expected one "
                f"of {', '.join(SCALAR_ARCHITECTURES)}; probable cause: a policy's folder"
            )
        self.megatron_model = MegatronModel(config, shape, rank_info, is_trainable=False)

    def load_hf(self, folder: str) -> None:
        """Load this rank's slices of a checkpoint of the same shape."""
        self.megatron_model.load_hf(folder)

    def compute_scores(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """Compute the raw score of every row.

        Returns:
            Row numbers and their `[rows]` float32 scores. One rank of the last pipeline stage
            of each data-parallel rank returns them, all others None.
        """
        batch = _append_placeholder_token(batch)
        width = batch.response_BT.size(1)
        select_BT = torch.arange(width)[None, :] == batch.length_B[:, None] - 1
        scored = self.megatron_model.forward_only(batch, select_BT, ScalarHead(num_positions=width))
        if scored is None:
            return None
        rows, (score_BT,) = scored
        # All positions but the selected one are 0.
        return rows, score_BT.sum(dim=1)

    def close(self) -> None:
        """Destroy the process groups; safe to call twice."""
        self.megatron_model.close()


def _append_placeholder_token(batch: TrainBatch) -> TrainBatch:
    """Return the batch with one more token appended to every row.

    Packing drops the last token of a row because it predicts nothing, but the score is computed
    from it. The appended token itself is never an input of the model; the position that would
    predict it is the last token of the row.
    """
    wider = pad_response_length(batch, batch.response_BT.size(1) + 1)
    return wider.with_fields(length_B=batch.length_B + 1)
