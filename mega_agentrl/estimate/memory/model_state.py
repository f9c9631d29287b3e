"""Computes the bytes of a policy rank's weights, gradients and optimizer state.

    weights    training dtype; in padded flat buffers with the distributed optimizer
    gradients  float32, in flat buffers, on every replica
    optimizer  two float32 moments, and float32 master weights unless the weights are float32, for
               the elements that the replica steps

The rank of a stage that steps the most elements counts. The reference policy of a KL term is a copy
of the weights in pinned host memory, whose blocks are rounded up to powers of two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.estimate.memory.flat_buffers import flat_buffers
from mega_agentrl.estimate.memory.rank_parameters import rank_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.sections.policy import ParallelConfig
    from mega_agentrl.estimate.memory.flat_buffers import FlatBuffer
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_FLOAT32_BYTES = 4
_PINNED_BLOCK_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The model state on one rank of a pipeline stage."""

    num_parameters: int
    """Number of parameter elements, without padding."""
    largest_parameter: int
    """Bytes of the largest parameter; its gradient briefly exists a second time in this dtype."""
    weights: int
    """Bytes of the weights."""
    gradients: int
    """Bytes of the gradients."""
    optimizer: int
    """Bytes of the optimizer state."""

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of pinned host memory for a copy of the weights."""
        whole, rest = divmod(self.weights, _PINNED_BLOCK_BYTES)
        return whole * _PINNED_BLOCK_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


def estimate_model_state(
    shape: ModelShape,
    layout: ParallelConfig,
    stage: int,
    *,
    item_bytes: int = 2,
    replica: int | None = None,
    expert_replica: int | None = None,
) -> ModelState:
    """Return the state of a rank after its first optimizer step.

    Args:
        shape: the model.
        layout: the parallel sizes.
        stage: the pipeline stage.
        item_bytes: bytes of a weight in training, 2 or 4.
        replica: index among the ranks with the same dense weights; None for the largest state.
        expert_replica: index among the ranks with the same experts; None for the largest state.

    Raises:
        ValueError: the parallel sizes do not divide the model.
    """
    parameters = rank_parameters(shape, layout, stage)
    buffers = flat_buffers(parameters, layout)
    numel = sum(buffer.numel for buffer in buffers)
    stepped = sum(
        _max_stepped_elements(buffers, expert=expert, replica=chosen)
        for expert, chosen in ((False, replica), (True, expert_replica))
    )
    copies = 2 if item_bytes == _FLOAT32_BYTES else 3
    return ModelState(
        num_parameters=sum(parameter.numel for parameter in parameters),
        largest_parameter=max(parameter.numel for parameter in parameters) * item_bytes,
        weights=numel * item_bytes,
        gradients=numel * _FLOAT32_BYTES,
        optimizer=stepped * copies * _FLOAT32_BYTES,
    )


def _max_stepped_elements(
    buffers: Sequence[FlatBuffer], *, expert: bool, replica: int | None
) -> int:
    """Return the number of dense or expert elements that one replica steps."""
    owned = [buffer.owned_by_replica for buffer in buffers if buffer.is_expert is expert]
    by_replica: list[int] = [sum(shares) for shares in zip(*owned, strict=True)]
    if not by_replica:
        return 0
    return max(by_replica) if replica is None else by_replica[replica]
