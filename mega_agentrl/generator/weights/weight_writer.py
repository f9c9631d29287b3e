"""Writes arriving tensor slices into the parameters of a running vLLM worker.

vLLM's layerwise reload has returned every module to the form that its loader fills, on the meta
device (kernels may have repacked the weights; on a CPU the original parameter is gone). A module
gets memory when its first slice arrives. When its last slice has arrived, its digests are computed,
and vLLM packs it for its kernel and moves the result to where CUDA graphs expect it. So only the
modules in progress are in memory twice. vLLM's loaders are not called: `ModuleWeightWriter` counts
elements by the layout that was traced from them.

On a CPU, modules in progress are kept outside the heap. In the heap they would lie between the
buffers that vLLM packs from them and leave holes that no aligned tensor of the same size fits into,
and the heap would grow with the size of the model.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from mega_agentrl.errors import InputError
from mega_agentrl.generator.vllm_compat import pack_loaded_module
from mega_agentrl.reshard.layout import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.adapters import AdapterReceiver
    from mega_agentrl.reshard.frames import PartBatch
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests


MIN_STAGING_BYTES = 1 << 20
"""Smaller modules stay in the heap."""
_PARAM_ALIGN_BYTES = 64


class StagingBufferPool:
    """Memory-mapped buffers of one rank, with huge pages if available; not thread-safe.

    A buffer is free again when the last tensor on it is gone. There are at most as many buffers as
    modules in progress.
    """

    def __init__(self) -> None:
        self._free_buffers: list[mmap.mmap] = []

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return `[size]` uint8 tensors with undefined values, for the parameters of one module.

        Args:
            sizes: Sizes in bytes.
        """
        starts = [0]
        for size in sizes:
            starts.append(round_up(starts[-1] + size, _PARAM_ALIGN_BYTES))
        buffer = self._take_buffer(starts[-1])
        view = memoryview(buffer)
        weakref.finalize(view, self._free_buffers.append, buffer)
        flat = torch.frombuffer(view, dtype=torch.uint8)
        return [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def clear(self) -> None:
        """Return free buffers to the system."""
        self._free_buffers.clear()

    def _take_buffer(self, num_bytes: int) -> mmap.mmap:
        """Return the smallest free buffer that fits, or a new one in place of the largest."""
        large_enough = [buffer for buffer in self._free_buffers if len(buffer) >= num_bytes]
        if large_enough:
            buffer = min(large_enough, key=len)
            self._free_buffers.remove(buffer)
            return buffer
        if self._free_buffers:
            self._free_buffers.remove(max(self._free_buffers, key=len))
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return buffer


@dataclass(slots=True)
class _PendingModule:
    """A module whose weights are arriving."""

    name: str
    module: torch.nn.Module
    shards: dict[str, ShardLayout] = field(default_factory=dict)
    """Shards by the parameter's name in the module."""
    num_missing: int = 0
    """Elements that have not arrived."""
    is_materialized: bool = False


class _ModuleRun(NamedTuple):
    """The parts of a batch that belong to one module."""

    pending: _PendingModule
    parts: PartBatch
    attributes: dict[str, str]
    """Attribute of the module that holds a parameter, by the parameter's name."""
    numel: int


class ModuleWeightWriter:
    """Implements `reshard.executor.WeightWriter` for one update after another."""

    def __init__(
        self,
        model: torch.nn.Module,
        layout: Sequence[ShardLayout],
        digests: ReceivedDigests,
        adapters: AdapterReceiver | None = None,
    ) -> None:
        self._digests = digests
        self._adapters = adapters
        self._weights_below: dict[str, torch.Tensor] = {}
        """Weights of the modules with adapters as they arrived, in host memory."""
        self._staging_pool = StagingBufferPool()
        self._pending_modules: dict[str, _PendingModule] = {}
        self._runs: dict[PartBatch, list[_ModuleRun]] = {}
        for shard in layout:
            path, _, attribute = shard.name.rpartition(".")
            if path not in self._pending_modules:
                self._pending_modules[path] = _PendingModule(path, model.get_submodule(path))
            self._pending_modules[path].shards[attribute] = shard

    def begin_update(self) -> None:
        """Expect all weights again; call this after `initialize_layerwise_reload`.

        Raises:
            ValueError: If the shape of a parameter differs from the layout.
        """
        self._digests.reset()
        self._staging_pool.clear()
        for pending in self._pending_modules.values():
            drop_packed_linear(pending.module)
            pending.is_materialized = False
            pending.num_missing = sum(
                block.local_rect.numel
                for shard in pending.shards.values()
                for block in shard.blocks
            )
            for attribute, shard in pending.shards.items():
                parameter = getattr(pending.module, attribute, None)
                shape = None if parameter is None else tuple(parameter.shape)
                if shape != shard.shape:
                    raise InputError(
                        shard.name,
                        shape,
                        f"shape {shard.shape}, as traced from the loader",
                        "a kernel that reshapes it before loading",
                    )

    def write(self, batch: PartBatch, frame: torch.Tensor) -> None:
        """Copy all parts of a frame, module by module."""
        if batch not in self._runs:
            self._runs[batch] = self._make_runs(batch)
        for pending, parts, attributes, numel in self._runs[batch]:
            if pending.num_missing < numel:
                raise InputError(
                    ", ".join(attributes),
                    f"{numel} elements",
                    f"at most {pending.num_missing}, the missing elements of the module",
                    "a plan that sends a slice twice",
                )
            if not pending.is_materialized:
                self._materialize(pending)
            module = pending.module
            params = {name: getattr(module, attr).data for name, attr in attributes.items()}
            self._digests.copy(parts, frame, params)
            pending.num_missing -= numel
            if pending.num_missing == 0:
                if self._has_adapters(pending):
                    self._keep_weights(pending)
                self._finish_module(pending, were_copied=True)

    def _make_runs(self, batch: PartBatch) -> list[_ModuleRun]:
        runs = []
        for path, parts in batch.split_by_module():
            attributes = {name: name.rpartition(".")[2] for name in parts.param_names}
            runs.append(_ModuleRun(self._pending_modules[path], parts, attributes, parts.numel))
        return runs

    def check_complete(self) -> None:
        """End an update; raises `ValueError` if modules are incomplete."""
        self._staging_pool.clear()
        incomplete = [
            f"{pending.name} ({pending.num_missing})"
            for pending in self._pending_modules.values()
            if pending.num_missing
        ]
        if incomplete:
            raise InputError(
                "missing elements by module",
                f"{', '.join(incomplete[:8])}, {len(incomplete)} modules in all",
                "none at the end of an update",
                "a plan that leaves out a slice",
            )

    def merge_adapters(self) -> None:
        """Write the weights with the adapters that were received into their modules.

        All other modules stay as they are. The weights below the adapters must have arrived.
        """
        assert self._adapters is not None, "the link has a session of adapters"
        for pending in self._pending_modules.values():
            if not self._has_adapters(pending):
                continue
            initialize_layerwise_reload(pending.module)
            drop_packed_linear(pending.module)
            self._materialize(pending)
            for attribute, shard in pending.shards.items():
                parameter = getattr(pending.module, attribute).data
                below = self._weights_below[shard.name].to(parameter.device)
                parameter.copy_(self._adapters.merge(shard, below))
            self._finish_module(pending, were_copied=False)
        self._staging_pool.clear()

    def _has_adapters(self, pending: _PendingModule) -> bool:
        adapters = self._adapters
        return adapters is not None and any(
            adapters.has_adapters(shard.name) for shard in pending.shards.values()
        )

    def _materialize(self, pending: _PendingModule) -> None:
        materialize_layer(pending.module, get_layerwise_info(pending.module))
        pending.is_materialized = True
        self._move_to_staging([getattr(pending.module, attribute) for attribute in pending.shards])
        for attribute, shard in pending.shards.items():
            parameter = getattr(pending.module, attribute)
            if sum(block.local_rect.numel for block in shard.blocks) < parameter.numel():
                parameter.data.zero_()  # padding

    def _move_to_staging(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Move a module's CPU parameters out of the heap, before they are written."""
        heap_params = [p for p in parameters if p.device.type == "cpu" and p.is_contiguous()]
        sizes = [parameter.numel() * parameter.element_size() for parameter in heap_params]
        if sum(sizes) < MIN_STAGING_BYTES:
            return
        for parameter, buffer in zip(heap_params, self._staging_pool.allocate(sizes), strict=True):
            parameter.data = buffer.view(parameter.dtype).view(parameter.shape)

    def _keep_weights(self, pending: _PendingModule) -> None:
        """Keep a copy of a module's weights, to which adapters are added in each update."""
        for attribute, shard in pending.shards.items():
            values = getattr(pending.module, attribute).data
            below = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
            self._weights_below[shard.name] = below.copy_(values)

    def _finish_module(self, pending: _PendingModule, *, were_copied: bool) -> None:
        self._digests.compute(
            (
                (shard, getattr(pending.module, attribute).data)
                for attribute, shard in pending.shards.items()
            ),
            were_copied=were_copied,
        )
        force_expert_repack(pending.module)
        pack_loaded_module(pending.module)


def drop_packed_linear(module: torch.nn.Module) -> None:
    """Drop the weights that vLLM has packed from a linear layer on a CPU.

    vLLM would keep the old copy until it has packed the new one.
    """
    vars(module).pop("cpu_linear", None)


def force_expert_repack(module: torch.nn.Module) -> None:
    """Make vLLM pack the experts of a module on a CPU again.

    vLLM packs them when it creates their kernel, which it does once. After a reload the kernel
    would read unpacked weights as packed ones and give wrong results without an error.
    """
    method = getattr(module, "quant_method", None)
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if on_cpu and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None
