"""Trainer ranks that hold tensor-parallel-like shards of Hugging Face tensors, in real processes.

Matrices are cut by rows, `o_proj` and `down_proj` by columns; gate and up lie stacked in one
parameter, as in Megatron; vectors are on every rank.
"""

from __future__ import annotations

import multiprocessing
import queue
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.reshard import transport
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.transport import ShardSender, WeightLink, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.reshard.plan import TransferPlan

ADDRESS = "127.0.0.1"
DEADLINE_S = 60.0


def shards_of(
    tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int
) -> tuple[list[ShardLayout], dict[str, torch.Tensor]]:
    """Layouts and values of one rank."""
    layouts, params = [], {}
    for name, tensor in tensors.items():
        if "up_proj" in name:
            continue
        parts = [name]
        if "gate_proj" in name:
            parts.append(name.replace("gate_proj", "up_proj"))
        blocks, values = [], []
        for part in parts:
            rect = _part_of(part, tuple(tensors[part].shape), rank, num_ranks)
            offset = sum(value.shape[0] for value in values)
            origin = (offset, *[0] * (tensor.ndim - 1))
            blocks.append(Block(part, rect, rect.shifted(rect.start, origin)))
            values.append(tensors[part][rect.slices])
        params[f"m.{name}"] = torch.cat(values)
        layouts.append(ShardLayout(f"m.{name}", tuple(params[f"m.{name}"].shape), tuple(blocks)))
    return layouts, params


def _part_of(name: str, shape: tuple[int, ...], rank: int, num_ranks: int) -> Rect:
    if len(shape) == 1:
        return Rect.whole(shape)
    dim = 1 if "o_proj" in name or "down_proj" in name else 0
    size = shape[dim] // num_ranks
    start, stop = [0, 0], list(shape)
    start[dim], stop[dim] = rank * size, (rank + 1) * size
    return Rect(tuple(start), tuple(stop))


class FakeTrainer:
    """All trainer ranks; `send` makes each of them send one version."""

    def __init__(self, plan: TransferPlan, timeout_s: float = 20.0) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._answers = self._context.Queue()
        self._orders = [self._context.Queue() for _ in range(plan.num_sources)]
        self._joined = [self._context.Event() for _ in range(plan.num_sources)]
        link = WeightLink(ADDRESS, 0, plan, timeout_s)
        self.processes = []
        self._start_rank(link, 0)
        self.link = replace(link, port=self._answers.get(timeout=DEADLINE_S))
        for rank in range(1, plan.num_sources):
            self._start_rank(self.link, rank)

    def _start_rank(self, link: WeightLink, rank: int) -> None:
        ends = (self._orders[rank], self._answers, self._joined[rank])
        process = self._context.Process(target=_run_rank, args=(link, rank, *ends), daemon=True)
        process.start()
        self.processes.append(process)

    def kill(self, rank: int) -> None:
        """Kill a rank once all of them have joined; before, the others could not join at all."""
        assert all(joined.wait(DEADLINE_S) for joined in self._joined), "a rank has not joined"
        self.processes[rank].kill()
        self.processes[rank].join(10)

    def send(self, tensors: Mapping[str, torch.Tensor], version: int, *, corrupt: str = "") -> None:
        """Start sending. corrupt: name of a tensor of which one bit is flipped on the way."""
        numpy = {name: tensor.numpy() for name, tensor in tensors.items()}
        for orders in self._orders:
            orders.put((numpy, version, corrupt))

    def results(self) -> list[Any]:
        """What every rank's `send` returned or raised."""
        try:
            return [self._answers.get(timeout=DEADLINE_S) for _ in self._orders]
        except queue.Empty:
            raise AssertionError("a trainer rank hangs") from None

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def _run_rank(link: WeightLink, rank: int, orders: Any, answers: Any, joined: Any) -> None:
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store = open_store(link.address, link.timeout_s)
        link = replace(link, port=store.port)
        answers.put(store.port)
    sender = ShardSender.join(link, rank=rank, store=store)
    joined.set()
    plain_pack = transport.pack
    while True:
        numpy, version, corrupt = orders.get()
        tensors = {name: torch.from_numpy(values) for name, values in numpy.items()}
        _, params = shards_of(tensors, rank, link.plan.num_sources)

        def pack(message, *args, corrupt=corrupt):
            buffer = plain_pack(message, *args)
            if corrupt and corrupt in [piece.block.hf_name for piece in message.pieces]:
                buffer[40] ^= 4
            return buffer

        transport.pack = pack
        try:
            answers.put(sender.send(params, version))
        except (RuntimeError, ValueError) as error:
            answers.put(error)
