"""Functions for `collective_rpc` that look into a live worker, or spoil it.

    engine.call("rpc", start_watching)
    engine.call("rpc", take_seen)        # by worker: what `Seen` describes, pickled

vLLM calls them in the worker's process, with the worker. What its loader, or our writer, has
written is copied just before vLLM processes it for the kernel, at a place both pass through.
"""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_SEEN = "_test_seen"


@dataclass
class Seen:
    """loaded: parameters before processing, of modules that are processed. current: parameters as
    they are now. logits: all that were computed since, in order, [N, V] each.
    """

    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    current: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)


def start_watching(worker: Any) -> None:
    """Once in the life of a worker."""
    model = worker.model_runner.get_model()
    seen = Seen()
    setattr(model, _SEEN, seen)
    name_of = {module: name for name, module in model.named_modules()}
    methods = {getattr(module, "quant_method", None) for module in name_of} - {None}
    for method in methods:
        method.process_weights_after_loading = _watched(
            method.process_weights_after_loading, name_of, seen
        )

    def keep(module: Any, args: Any, logits: Any) -> None:
        if logits is not None:
            seen.logits.append(logits.clone())

    model.logits_processor.register_forward_hook(keep)


def _watched(process: Any, name_of: dict[Any, str], seen: Seen) -> Any:
    def watched(module: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            seen.loaded[f"{name_of[module]}.{key}"] = parameter.detach().clone()
        process(module)

    return watched


def take_seen(worker: Any) -> bytes:
    """Pickled `Seen` since the last call."""
    model = worker.model_runner.get_model()
    seen = getattr(model, _SEEN)
    current = {name: value.detach().clone() for name, value in model.named_parameters()}
    answer = pickle.dumps(replace(seen, current=current))
    seen.loaded.clear()
    seen.logits.clear()
    return answer


def load_from_disk(worker: Any, folder: str) -> None:
    """vLLM's own loader on a folder, as it reloads weights; experts as it packs them at the start
    (left alone, it does not do so again on a CPU).
    """
    for module in worker.model_runner.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None
    worker.vllm_config.load_config.load_format = "auto"  # it may have started without weights
    worker.reload_weights(weights_path=folder)


def exchange_blocks(worker: Any, one: str, two: str) -> None:
    """Let the worker take one tensor for the other; both have the same rectangles."""
    engine = worker.weight_transfer_engine
    other = {one: two, two: one}
    engine._layout = [
        replace(
            shard,
            blocks=tuple(replace(b, hf_name=other.get(b.hf_name, b.hf_name)) for b in shard.blocks),
        )
        for shard in engine.layout()
    ]


def trace_again(worker: Any) -> None:
    """Undo `exchange_blocks`."""
    worker.weight_transfer_engine._layout = None


def die_in_update(worker: Any, rank: int, num_pieces: int) -> None:
    """Kill the process of a worker when it has got some slices of the next update."""
    if worker.rank != rank:
        return
    writer = worker.weight_transfer_engine.writer
    write, left = writer.write, [num_pieces]

    def write_or_die(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    writer.write = write_or_die
