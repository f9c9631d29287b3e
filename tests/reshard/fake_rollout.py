"""Rollout ranks without vLLM: threads of the test, with the layouts of real workers.

rollout = FakeRollout(layouts)
rollout.join(session)
errors = rollout.receive(version)       # by rank: None, or what it raised
wrong = rollout.mismatches(digest_of)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mega_agentrl.reshard.frames import FramePart, PartBatch
from mega_agentrl.reshard.layout import round_up
from mega_agentrl.reshard.planner.transfer_plan import TensorSlice
from mega_agentrl.reshard.session import join_session
from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests
from tests.reshard.faults import inject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.reshard.executor import TransferExecutor
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import ParamSlice
    from mega_agentrl.reshard.session import TransferSession
    from mega_agentrl.reshard.verify.digest_verifier import DigestRegion
    from tests.reshard.faults import Fault, Hit


def expected_of(
    regions: Sequence[DigestRegion], digest_of: Mapping[DigestRegion, tuple[int, int]]
) -> np.ndarray:
    """What a rank compares with: [regions, 2] uint32."""
    return np.array([digest_of[region] for region in regions], dtype=np.uint32).reshape(-1, 2)


def frame_of(values_of: Mapping[ParamSlice, torch.Tensor]) -> tuple[PartBatch, torch.Tensor]:
    """A frame with these values, without a header, and its parts."""
    parts, start = [], 0
    for param_slice, values in values_of.items():
        tensor_slice = TensorSlice(param_slice.param, param_slice.rect, values.nbytes)
        span = slice(start, start + values.nbytes)
        parts.append(FramePart(tensor_slice, span, values.dtype, param_slice))
        start = round_up(span.stop, 16)
    frame = torch.zeros(start, dtype=torch.uint8)
    for part, values in zip(parts, values_of.values(), strict=True):
        part.view(frame).copy_(values)
    return PartBatch(tuple(parts)), frame


class PlainWeightWriter:
    """Parameters that are simply there."""

    def __init__(self, layout: Sequence[ShardLayout], dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        self.dtype = dtype
        self.regions: ReceivedDigests | None = None
        self.clear()

    def clear(self) -> None:
        self.params = {s.name: torch.zeros(s.shape, dtype=self.dtype) for s in self.layout}
        self.missing = sum(b.local_rect.numel for s in self.layout for b in s.blocks)
        if self.regions is not None:
            self.regions.reset()

    def write(self, batch: PartBatch, frame: torch.Tensor) -> None:
        if self.regions is not None:
            self.regions.copy(batch, frame, self.params)
        else:
            batch.unpack(frame, self.params)
        self.missing -= batch.numel


class FakeRollout:
    """All rollout ranks of a session."""

    def __init__(
        self, layouts: Sequence[Sequence[ShardLayout]], dtype: torch.dtype = torch.float32
    ) -> None:
        self.writers = [PlainWeightWriter(layout, dtype) for layout in layouts]
        self.executors: list[TransferExecutor] = []
        self.hit: Hit | None = None
        self._pool = ThreadPoolExecutor(len(layouts))

    def join(self, session: TransferSession) -> None:
        """Raises what a rank raises."""
        self.leave()
        self._plan = session.plan
        first = session.plan.num_trainer_ranks
        for writer in self.writers:
            writer.regions = ReceivedDigests(writer.layout, session.plan.dtype_of)
        self.executors = self._on_all(
            lambda index: join_session(session, first + index, self.writers[index].layout)
        )

    def receive(self, version: int, *, fault: Fault | None = None) -> list[Exception | None]:
        """fault: of a frame that a rollout rank forwards."""
        self.hit = None

        def one(index: int) -> Exception | None:
            writer, executor = self.writers[index], self.executors[index]
            writer.clear()
            injected = nullcontext()
            if fault is not None and fault.rank == executor.rank:
                injected = inject(fault, executor.rank, executor, self._plan, {})
            try:
                with injected as hit:
                    self.hit = hit or self.hit
                    executor.receive(writer, version)
            except (RuntimeError, ValueError) as error:
                return error
            if writer.missing:
                return ValueError(f"rank {executor.rank} lacks {writer.missing} elements")
            return None

        return self._on_all(one)

    def find_mismatches(
        self, digest_of: Mapping[DigestRegion, tuple[int, int]]
    ) -> list[list[DigestRegion]]:
        """Regions by rank that are not what the trainer says."""
        found = []
        for writer in self.writers:
            regions = writer.regions
            regions.compute((shard, writer.params[shard.name]) for shard in writer.layout)
            found.append(regions.find_mismatches(expected_of(regions.regions, digest_of)))
        return found

    def leave(self) -> None:
        for executor in self.executors:
            executor.close()
        self.executors = []

    def close(self) -> None:
        self.leave()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(function, range(len(self.writers))))
