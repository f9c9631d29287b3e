"""The model-parallel position of one rank, which determines the parameters it holds.

Dense weights are distributed over tensor and pipeline ranks, experts over the expert and
expert-tensor ranks of the same processes. With `virtual_size` V a pipeline rank holds V chunks of
layers: chunk v of rank p is the (v * pipeline_size + p)-th run of layers of the model. Data and
context ranks hold replicas and do not appear.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelRank:
    """Ranks and sizes of one process along each model-parallel axis.

    Raises `ValueError` for a rank outside its size.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    virtual_size: int = 1
    """Number of layer chunks per pipeline rank."""
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tensor", "pipeline", "expert", "expert_tensor"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank={rank}: expected 0..{size - 1}")
        if self.virtual_size < 1:
            raise ValueError(f"virtual_size={self.virtual_size}: expected at least 1")

    def param_prefix(self, chunk: int) -> str:
        """Return the prefix of a chunk's parameter names, empty if there is only one chunk."""
        return f"chunk{chunk}." if self.virtual_size > 1 else ""

    def holds_embedding(self, chunk: int) -> bool:
        """Return whether this is the first chunk of the model."""
        return self.pipeline_rank == 0 and chunk == 0

    def holds_output_layer(self, chunk: int) -> bool:
        """Return whether this is the last chunk of the model."""
        return self.pipeline_rank == self.pipeline_size - 1 and chunk == self.virtual_size - 1
