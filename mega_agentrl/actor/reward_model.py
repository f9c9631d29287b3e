"""One rank of a reward model: a frozen sequence classifier with one label.

The score of a row is read at its last token, prompt and response taken together, as
transformers' `...ForSequenceClassification` does for a sequence without padding. Nothing is
trained: there are no gradient buffers and no optimizer.

Values in and out are plain or CPU tensors, so that a remote call can carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.heads import ScalarHead
from mega_agentrl.actor.network import Network, Seat
from mega_agentrl.batch.operations import pad_width
from mega_agentrl.reshard.model_shape import SCALAR_ARCHITECTURES, HeadKind, ModelShape

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch


class RewardRank:
    """One process's part of the reward model; weights are undefined until `load`."""

    def __init__(self, config: TrainConfig, seat: Seat, *, model_path: str) -> None:
        """model_path: checkpoint of a sequence classifier with one label.

        Raises `ValueError` for any other.
        """
        shape = ModelShape.from_folder(model_path)
        if shape.head is not HeadKind.scalar:
            raise ValueError(
                f"reward model {model_path}: got architecture {shape.architecture}, expected one "
                f"of {', '.join(SCALAR_ARCHITECTURES)}; probable cause: a policy's folder"
            )
        self.network = Network(config, shape, seat, trains=False)

    def load(self, folder: str) -> None:
        """Read this rank's slices of a checkpoint of the same shape."""
        self.network.load(folder)

    def scores(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """The score of every row, as the model gives it.

        Returns the rows of this rank's data share and their [rows] float32 scores, on one
        rank of the share's last stage, else None.
        """
        batch = _with_successor(batch)
        width = batch.response_BT.size(1)
        select_BT = torch.arange(width)[None, :] == batch.length_B[:, None] - 1
        scored = self.network.score(batch, select_BT, ScalarHead(num_positions=width))
        if scored is None:
            return None
        rows, (score_BT,) = scored
        # One position of a row is set, the others are 0.
        return rows, score_BT.sum(dim=1)

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        self.network.close()


def _with_successor(batch: TrainBatch) -> TrainBatch:
    """The batch with one more token behind every row.

    Packed rows leave out their last token, which predicts nothing; here it is the one that
    matters. The token put behind it is never read, and where it would be predicted the model
    has seen exactly the row.
    """
    wider = pad_width(batch, batch.response_BT.size(1) + 1)
    return wider.with_fields(length_B=batch.length_B + 1)
