"""Bytes of a policy rank's weights, gradients and optimizer state.

    weights    in the training type; with the distributed optimizer in padded flat buffers
    gradients  float32, in flat buffers, on every replica
    optimizer  two float32 moments, and a float32 master unless the weights are float32; of what
               the replica steps

Of a stage's ranks the one that steps most counts, of the stages each by itself. The reference
of a KL term is a copy of the weights in pinned host memory, in blocks of a power of two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.estimate.flat_buffers import flat_buffers
from mega_agentrl.estimate.rank_parameters import rank_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.policy_schema import ParallelConfig
    from mega_agentrl.estimate.flat_buffers import FlatBuffer
    from mega_agentrl.reshard.model_shape import ModelShape

_FLOAT32_BYTES = 4
_PINNED_BLOCK_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Bytes on one rank of a stage. num_parameters: elements, padding not counted. largest: of
    the largest parameter, whose gradient exists once more for a moment in the training type.
    """

    num_parameters: int
    largest: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def host_copy(self) -> int:
        """Host memory for a copy of the weights."""
        whole, rest = divmod(self.weights, _PINNED_BLOCK_BYTES)
        return whole * _PINNED_BLOCK_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


def model_state(
    shape: ModelShape,
    layout: ParallelConfig,
    stage: int,
    *,
    item_bytes: int = 2,
    replica: int | None = None,
    expert_replica: int | None = None,
) -> ModelState:
    """State of a rank of a stage after its first optimizer step.

    item_bytes: of a weight in training, 2 or 4. replica: place among the ranks with the same
    dense weights, expert_replica among those with the same experts; None is the one with most.
    Raises `ValueError` where the cut does not divide the model.
    """
    parameters = rank_parameters(shape, layout, stage)
    buffers = flat_buffers(parameters, layout)
    numel = sum(buffer.numel for buffer in buffers)
    stepped = sum(
        _most_stepped(buffers, expert=expert, replica=chosen)
        for expert, chosen in ((False, replica), (True, expert_replica))
    )
    copies = 2 if item_bytes == _FLOAT32_BYTES else 3
    return ModelState(
        num_parameters=sum(parameter.numel for parameter in parameters),
        largest=max(parameter.numel for parameter in parameters) * item_bytes,
        weights=numel * item_bytes,
        gradients=numel * _FLOAT32_BYTES,
        optimizer=stepped * copies * _FLOAT32_BYTES,
    )


def _most_stepped(buffers: Sequence[FlatBuffer], *, expert: bool, replica: int | None) -> int:
    """Elements that one replica steps of the dense parameters, or of those of experts."""
    owned = [buffer.owned for buffer in buffers if buffer.expert is expert]
    by_replica: list[int] = [sum(shares) for shares in zip(*owned, strict=True)]
    if not by_replica:
        return 0
    return max(by_replica) if replica is None else by_replica[replica]
