"""Watches a weight loader and writes down which part of which tensor it copies where.

Sources are placeholders of the checkpoint's tensors on the meta device, sinks the parameters of
a model. A view keeps the storage of its tensor, so (storage, offset, sizes, strides) says of
anything a loader slices which elements of which tensor it is; no loader needs to cooperate:

    narrow, chunk, view, detach, ...   a view of a source or sink: passes
    sink.copy_(source)                 a block: recorded, not executed
    sink.fill_(0), sink.zero_()        padding: recorded, not executed
    anything else on a source or sink  `ValueError` with tensor and operation: it would change
                                       values, or move them in a way no rectangle describes

A strided view is a rectangle of its base exactly if both visit the same addresses in the same
order; with dims of one element dropped and dims merged that lie one inside the other, that is
equality of two short lists of (size, stride).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mega_agentrl.reshard.layout import Block, Rect

_REINTERPRETS = (torch.ops.aten.view.dtype, torch.ops.aten.view_as_complex.default)
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(slots=True)
class Recorded:
    """What a loader did to one parameter: blocks copied, rectangles set to zero."""

    blocks: list[Block] = field(default_factory=list)
    zeros: list[Rect] = field(default_factory=list)


class LoadRecorder(TorchDispatchMode):
    """Context manager around the loader.

    sources: placeholders by Hugging Face name. sinks: parameters by name; they may hold values,
    which stay as they are. All must be contiguous and start their storage.
    """

    def __init__(
        self, sources: Mapping[str, torch.Tensor], sinks: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self._sources, self._sinks = _by_storage(sources), _by_storage(sinks)
        self.recorded: dict[str, Recorded] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = [t for t in tree_leaves((args, kwargs)) if self._name(t)]
        if not touched or (_is_view(func) and func not in _REINTERPRETS):
            return func(*args, **kwargs)
        if func is _COPY and self._sink(args[0]) and self._source(args[1]):
            return self._copy(args[0], args[1])
        if func in _FILLS and self._sink(args[0]):
            return self._fill(args[0], args[1] if len(args) > 1 else 0)
        names = ", ".join(sorted({str(self._name(t)) for t in touched}))
        raise ValueError(
            f"tracing the weight loader: {names} is used in {func}, expected only slices, views, "
            "copies into a parameter and zeros; probable cause: this model's loader computes with "
            "its weights, so no rectangle of the checkpoint lands in it"
        )

    def _copy(self, sink: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        (name, shape), (hf_name, hf_shape) = self._sink(sink), self._source(source)
        if sink.numel() == 0 and source.numel() == 0:
            return sink
        local_rect, hf_rect = view_rect(shape, sink), view_rect(hf_shape, source)
        if not local_rect or not hf_rect or local_rect.sides != hf_rect.sides:
            raise ValueError(
                f"tracing the weight loader: {hf_name} {hf_shape} seen as {_seen(source)} is "
                f"copied into {name} {shape} seen as {_seen(sink)}, expected two rectangles of "
                "one shape; probable cause: the loader transposes, repeats or interleaves it"
            )
        recorded = self.recorded.setdefault(name, Recorded())
        recorded.blocks.append(Block(hf_name, hf_rect, local_rect))
        return sink

    def _fill(self, sink: torch.Tensor, value: Any) -> torch.Tensor:
        name, shape = self._sink(sink)
        if sink.numel() == 0:
            return sink
        rect = view_rect(shape, sink)
        if value != 0 or not rect:
            raise ValueError(
                f"tracing the weight loader: {name} {shape} seen as {_seen(sink)} is filled with "
                f"{value}, expected a rectangle and 0; probable cause: a constant that is no "
                "padding"
            )
        recorded = self.recorded.setdefault(name, Recorded())
        written = next((b for b in recorded.blocks if rect.intersect(b.local_rect)), None)
        if written:
            raise ValueError(
                f"tracing the weight loader: {name} {rect} is set to zero after "
                f"{written.hf_name} was copied there; probable cause: a loader that loads twice"
            )
        recorded.zeros.append(rect)
        return sink

    def _source(self, tensor: Any) -> Any:
        return _look_up(self._sources, tensor)

    def _sink(self, tensor: Any) -> Any:
        return _look_up(self._sinks, tensor)

    def _name(self, tensor: Any) -> str | None:
        found = self._source(tensor) or self._sink(tensor)
        return found[0] if found else None


def view_rect(shape: tuple[int, ...], view: torch.Tensor) -> Rect | None:
    """The rectangle of a contiguous tensor of `shape` that a view of it is.

    None if the view is none: a transpose, a step, an overlap, rows and parts of rows. The view
    may have more or fewer dims than the tensor; its order of elements must be the rectangle's.
    """
    strides = _strides(shape)
    start = view.storage_offset()
    sides = zip(view.shape, view.stride(), strict=True)
    end = start + sum((size - 1) * stride for size, stride in sides)
    if view.numel() == 0 or end >= torch.Size(shape).numel():
        return None
    first, last = _unravel(start, strides), _unravel(end, strides)
    if any(a > b for a, b in zip(first, last, strict=True)):
        return None
    rect = Rect(first, tuple(b + 1 for b in last))
    same = _merged(rect.shape, strides) == _merged(view.shape, view.stride())
    return rect if same else None


def _merged(sizes: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """The order in which elements are visited, in the fewest (size, stride)."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])


def _unravel(offset: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    position = []
    for stride in strides:
        position.append(offset // stride)
        offset %= stride
    return tuple(position)


def _seen(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} from {tensor.storage_offset()}"


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[int, tuple[str, tuple[int, ...]]]:
    table: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.storage_offset():
            raise ValueError(
                f"{name} is seen as {_seen(tensor)}, expected a contiguous tensor with a storage "
                "of its own; probable cause: its kernel keeps it in another order"
            )
        # The first name of a tensor that several modules share counts.
        table.setdefault(_storage(tensor), (name, tuple(tensor.shape)))
    return table


def _look_up(table: dict[int, tuple[str, tuple[int, ...]]], tensor: Any) -> Any:
    return table.get(_storage(tensor)) if isinstance(tensor, torch.Tensor) else None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    schema = func._schema
    writes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
    return not writes and any(r.alias_info is not None for r in schema.returns)
