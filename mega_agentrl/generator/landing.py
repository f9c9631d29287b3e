"""Puts arriving pieces into the parameters of a running vLLM worker.

vLLM's layerwise reload has taken every module back to the form its loader fills, on the meta
device (kernels may have repacked the weights; on a CPU the original parameter is gone). A module
gets memory with its first piece; its last piece makes it whole: digests are done, vLLM packs it
for its kernel and moves the result to where CUDA graphs expect it. So no more is in memory
twice than the modules that are under way. On a CPU the copies that vLLM has packed beside the
parameters go before anything comes, and modules wait outside the heap (`module_rooms`).

The bookkeeping of vLLM's own loaders is not used, because nothing passes through them: `Landing`
counts elements by the layout that was traced from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from mega_agentrl.generator.module_rooms import LEAST_BYTES, ModuleRooms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mega_agentrl.reshard.delivery import Place
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.proof import Regions


@dataclass(slots=True)
class _Hold:
    """A module on its way in. shards: by the parameter's name in the module."""

    name: str
    module: torch.nn.Module
    shards: dict[str, ShardLayout] = field(default_factory=dict)
    missing: int = 0
    open: bool = False


class ModuleLanding:
    """Implements `reshard.courier.Landing` for one update after another."""

    def __init__(
        self, model: torch.nn.Module, layout: Sequence[ShardLayout], regions: Regions
    ) -> None:
        self._regions = regions
        self._rooms = ModuleRooms()
        self._holds: dict[str, _Hold] = {}
        for shard in layout:
            path, _, attribute = shard.name.rpartition(".")
            if path not in self._holds:
                self._holds[path] = _Hold(path, model.get_submodule(path))
            self._holds[path].shards[attribute] = shard

    def begin(self) -> None:
        """Expect everything anew; the model is in the state of `initialize_layerwise_reload`.

        Raises `ValueError` for a parameter whose shape is not the one in the layout.
        """
        self._regions.clear()
        self._rooms.clear()
        for hold in self._holds.values():
            drop_packed(hold.module)
            hold.open = False
            hold.missing = sum(
                block.local_rect.numel for shard in hold.shards.values() for block in shard.blocks
            )
            for attribute, shard in hold.shards.items():
                parameter = getattr(hold.module, attribute, None)
                shape = None if parameter is None else tuple(parameter.shape)
                if shape != shard.shape:
                    raise ValueError(
                        f"{shard.name} has shape {shape}, expected {shard.shape} as traced from "
                        "the loader; probable cause: a kernel that reshapes it before loading"
                    )

    def write(self, place: Place, values: torch.Tensor) -> None:
        """See `courier.Landing.write`."""
        path, _, attribute = place.param.rpartition(".")
        hold = self._holds[path]
        if hold.missing < place.rect.numel:
            raise ValueError(
                f"{place.param} {place.rect} arrived with {hold.missing} elements of its module "
                "missing; probable cause: a plan that brings something twice"
            )
        if not hold.open:
            self._open(hold)
        self._regions.copy(place, getattr(hold.module, attribute).data[place.rect.slices], values)
        hold.missing -= place.rect.numel
        if hold.missing == 0:
            self._close(hold)

    def check_complete(self) -> None:
        """The end of an update. Raises `ValueError` naming modules that did not get everything."""
        self._rooms.clear()
        short = [f"{h.name} ({h.missing} elements)" for h in self._holds.values() if h.missing]
        if short:
            raise ValueError(
                f"modules that are not complete: {', '.join(short[:8])}, {len(short)} in all; "
                "probable cause: a plan with a hole"
            )

    def _open(self, hold: _Hold) -> None:
        materialize_layer(hold.module, get_layerwise_info(hold.module))
        hold.open = True
        self._move_in([getattr(hold.module, attribute) for attribute in hold.shards])
        for attribute, shard in hold.shards.items():
            parameter = getattr(hold.module, attribute)
            if sum(block.local_rect.numel for block in shard.blocks) < parameter.numel():
                parameter.data.zero_()  # padding

    def _move_in(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take a module's parameters out of the heap of a CPU, before anything is in them."""
        moving = [p for p in parameters if p.device.type == "cpu" and p.is_contiguous()]
        sizes = [parameter.numel() * parameter.element_size() for parameter in moving]
        if sum(sizes) < LEAST_BYTES:
            return
        for parameter, room in zip(moving, self._rooms.lend(sizes), strict=True):
            parameter.data = room.view(parameter.dtype).view(parameter.shape)

    def _close(self, hold: _Hold) -> None:
        self._regions.take(
            (shard, getattr(hold.module, attribute).data)
            for attribute, shard in hold.shards.items()
        )
        info = get_layerwise_info(hold.module)
        info.load_numel = info.load_numel_total or 0
        pack_experts_again(hold.module)
        _layerwise_process(hold.module, info)


def drop_packed(module: torch.nn.Module) -> None:
    """Let go what vLLM has packed from a linear layer on a CPU.

    It packs every layer anew, and would keep the old copy until the new one lies beside it.
    Until then the layer cannot compute, which no worker may with an update under way.
    """
    vars(module).pop("cpu_linear", None)


def pack_experts_again(module: torch.nn.Module) -> None:
    """Let vLLM pack the experts of a module on a CPU when it processes it the next time.

    It packs them where it makes their kernel, which it does once: at a reload the kernel would
    read plain weights as packed ones, and say wrong things without an error.
    """
    method = getattr(module, "quant_method", None)
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if on_cpu and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None
