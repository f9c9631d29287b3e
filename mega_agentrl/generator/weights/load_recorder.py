"""Records which part of which checkpoint tensor a weight loader copies to which parameter.

Sources are placeholders of the checkpoint's tensors on the meta device; targets are the parameters
of a model. A view keeps the storage of its tensor, so (storage, offset, sizes, strides) identifies
the elements of anything a loader slices, without the loader's cooperation:

    narrow, chunk, view, detach, ...   a view of a source or parameter: executed
    param.copy_(source)                a block: recorded, not executed
    param.fill_(0), param.zero_()      padding: recorded, not executed
    any other operation on either      `InputError`: it would change values, or move them in a way
                                       that no rectangle describes

A strided view is a rectangle of its base if and only if both visit the same addresses in the same
order. After dropping dims of size one and merging nested dims, that is equality of two short lists
of (size, stride).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Block, Rect

_REINTERPRETING_OPS = (torch.ops.aten.view.dtype, torch.ops.aten.view_as_complex.default)
_COPY_OP = torch.ops.aten.copy_.default
_FILL_OPS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(slots=True)
class ParamLoad:
    """Copies and fills that a loader made in one parameter."""

    blocks: list[Block] = field(default_factory=list)
    """Copies from the checkpoint."""
    zero_rects: list[Rect] = field(default_factory=list)
    """Rectangles set to zero."""


class LoadRecorder(TorchDispatchMode):
    """Context manager that records the copies of a loader in `param_loads`.

    Args:
        sources: Placeholders by Hugging Face name.
        params: Parameters by name; they keep their values.

    All tensors must be contiguous and start their storage.
    """

    def __init__(
        self, sources: Mapping[str, torch.Tensor], params: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self._checkpoint_tensors, self._params = _by_storage(sources), _by_storage(params)
        self.param_loads: dict[str, ParamLoad] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known_tensors = [t for t in tree_leaves((args, kwargs)) if self._tensor_name(t)]
        if not known_tensors or (_is_view(func) and func not in _REINTERPRETING_OPS):
            return func(*args, **kwargs)
        if func is _COPY_OP and self._find_param(args[0]) and self._find_checkpoint_tensor(args[1]):
            return self._record_copy(args[0], args[1])
        if func in _FILL_OPS and self._find_param(args[0]):
            return self._record_fill(args[0], args[1] if len(args) > 1 else 0)
        names = ", ".join(sorted({str(self._tensor_name(t)) for t in known_tensors}))
        raise InputError(
            names,
            func,
            "only slices, views, copies into a parameter and zeros in the weight loader",
            "this model's loader computes with its weights, so no rectangle of the checkpoint "
            "lands in it",
        )

    def _record_copy(self, param: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        name, shape = self._find_param(param)
        hf_name, hf_shape = self._find_checkpoint_tensor(source)
        if param.numel() == 0 and source.numel() == 0:
            return param
        local_rect, hf_rect = view_rect(shape, param), view_rect(hf_shape, source)
        if not local_rect or not hf_rect or local_rect.squeezed_shape != hf_rect.squeezed_shape:
            raise InputError(
                hf_name,
                f"{hf_shape} seen as {_describe_view(source)}, copied into {name} {shape} seen as "
                f"{_describe_view(param)}",
                "two rectangles of one shape",
                "the weight loader transposes, repeats or interleaves it",
            )
        param_load = self.param_loads.setdefault(name, ParamLoad())
        param_load.blocks.append(Block(hf_name, hf_rect, local_rect))
        return param

    def _record_fill(self, param: torch.Tensor, value: Any) -> torch.Tensor:
        name, shape = self._find_param(param)
        if param.numel() == 0:
            return param
        rect = view_rect(shape, param)
        if value != 0 or not rect:
            raise InputError(
                name,
                f"{shape} seen as {_describe_view(param)}, which the weight loader fills with "
                f"{value}",
                "a rectangle and 0",
                "a constant that is not padding",
            )
        param_load = self.param_loads.setdefault(name, ParamLoad())
        overwritten = next((b for b in param_load.blocks if rect.intersect(b.local_rect)), None)
        if overwritten:
            raise InputError(
                name,
                f"{rect} set to zero after {overwritten.hf_name} was copied there",
                "zeros before copies",
                "a weight loader that loads twice",
            )
        param_load.zero_rects.append(rect)
        return param

    def _find_checkpoint_tensor(self, tensor: Any) -> Any:
        return _look_up(self._checkpoint_tensors, tensor)

    def _find_param(self, tensor: Any) -> Any:
        return _look_up(self._params, tensor)

    def _tensor_name(self, tensor: Any) -> str | None:
        entry = self._find_checkpoint_tensor(tensor) or self._find_param(tensor)
        return entry[0] if entry else None


def view_rect(shape: tuple[int, ...], view: torch.Tensor) -> Rect | None:
    """Return the rectangle of a contiguous tensor of `shape` that a view of it covers.

    The view may have more or fewer dims than the tensor; its order of elements must be the
    rectangle's. Returns None for anything else: a transpose, a step, an overlap, or whole rows
    followed by a part of a row.
    """
    strides = _contiguous_strides(shape)
    start = view.storage_offset()
    sides = zip(view.shape, view.stride(), strict=True)
    end = start + sum((size - 1) * stride for size, stride in sides)
    if view.numel() == 0 or end >= torch.Size(shape).numel():
        return None
    first, last = _unravel(start, strides), _unravel(end, strides)
    if any(a > b for a, b in zip(first, last, strict=True)):
        return None
    rect = Rect(first, tuple(b + 1 for b in last))
    is_rect = _coalesce_dims(rect.shape, strides) == _coalesce_dims(view.shape, view.stride())
    return rect if is_rect else None


def _coalesce_dims(sizes: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """Return the order in which elements are visited as the fewest (size, stride) pairs."""
    coalesced: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if coalesced and coalesced[-1][1] == size * stride:
            coalesced[-1] = (coalesced[-1][0] * size, stride)
        else:
            coalesced.append((size, stride))
    return coalesced


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
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


def _describe_view(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} from {tensor.storage_offset()}"


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[int, tuple[str, tuple[int, ...]]]:
    table: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.storage_offset():
            raise InputError(
                name,
                _describe_view(tensor),
                "a contiguous tensor with a storage of its own",
                "its kernel keeps it in another order",
            )
        # A tensor that several modules share is known by its first name.
        table.setdefault(_storage_id(tensor), (name, tuple(tensor.shape)))
    return table


def _look_up(table: dict[int, tuple[str, tuple[int, ...]]], tensor: Any) -> Any:
    return table.get(_storage_id(tensor)) if isinstance(tensor, torch.Tensor) else None


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    schema = func._schema
    writes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
    return not writes and any(r.alias_info is not None for r in schema.returns)
