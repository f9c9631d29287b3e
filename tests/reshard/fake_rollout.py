"""Rollout ranks without vLLM: threads of the test, with the layouts of real workers.

rollout = FakeRollout(layouts)
rollout.join(link)
errors = rollout.receive(version)       # by rank: None, or what it raised
wrong = rollout.mismatches(digest_of)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mega_agentrl.reshard.proof import Regions
from mega_agentrl.reshard.transport import join
from tests.reshard.faults import inject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.reshard.courier import Courier
    from mega_agentrl.reshard.delivery import Place
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.proof import Region
    from mega_agentrl.reshard.transport import WeightLink
    from tests.reshard.faults import Fault, Hit


def expected_of(
    regions: Sequence[Region], digest_of: Mapping[Region, tuple[int, int]]
) -> np.ndarray:
    """What a rank compares with: [regions, 2] uint32."""
    return np.array([digest_of[region] for region in regions], dtype=np.uint32).reshape(-1, 2)


class PlainLanding:
    """Parameters that are simply there."""

    def __init__(self, layout: Sequence[ShardLayout], dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        self.dtype = dtype
        self.regions: Regions | None = None
        self.clear()

    def clear(self) -> None:
        self.params = {s.name: torch.zeros(s.shape, dtype=self.dtype) for s in self.layout}
        self.missing = sum(b.local_rect.numel for s in self.layout for b in s.blocks)
        if self.regions is not None:
            self.regions.clear()

    def write(self, place: Place, values: torch.Tensor) -> None:
        to = self.params[place.param][place.rect.slices]
        if self.regions is not None:
            self.regions.copy(place, to, values)
        else:
            to.copy_(values)
        self.missing -= place.rect.numel


class FakeRollout:
    """All rollout ranks of a link."""

    def __init__(
        self, layouts: Sequence[Sequence[ShardLayout]], dtype: torch.dtype = torch.float32
    ) -> None:
        self.landings = [PlainLanding(layout, dtype) for layout in layouts]
        self.couriers: list[Courier] = []
        self.hit: Hit | None = None
        self._pool = ThreadPoolExecutor(len(layouts))

    def join(self, link: WeightLink) -> None:
        """Raises what a rank raises."""
        self.leave()
        self._plan = link.plan
        first = link.plan.num_sources
        for landing in self.landings:
            landing.regions = Regions(landing.layout, link.plan.dtype_of)
        self.couriers = self._on_all(
            lambda sink: join(link, first + sink, self.landings[sink].layout)
        )

    def receive(self, version: int, *, fault: Fault | None = None) -> list[Exception | None]:
        """fault: of a frame that a rollout rank passes on."""
        self.hit = None

        def one(sink: int) -> Exception | None:
            landing, courier = self.landings[sink], self.couriers[sink]
            landing.clear()
            injected = nullcontext()
            if fault is not None and fault.rank == courier.rank:
                injected = inject(fault, courier.rank, courier, self._plan, {})
            try:
                with injected as hit:
                    self.hit = hit or self.hit
                    courier.receive(landing, version)
            except (RuntimeError, ValueError) as error:
                return error
            if landing.missing:
                return ValueError(f"rank {courier.rank} lacks {landing.missing} elements")
            return None

        return self._on_all(one)

    def mismatches(self, digest_of: Mapping[Region, tuple[int, int]]) -> list[list[Region]]:
        """Regions by rank that are not what the trainer says."""
        found = []
        for landing in self.landings:
            regions = landing.regions
            regions.take((shard, landing.params[shard.name]) for shard in landing.layout)
            found.append(regions.mismatches(expected_of(regions.regions, digest_of)))
        return found

    def leave(self) -> None:
        for courier in self.couriers:
            courier.close()
        self.couriers = []

    def close(self) -> None:
        self.leave()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(function, range(len(self.landings))))
