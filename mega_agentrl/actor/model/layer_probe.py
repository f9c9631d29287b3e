"""Intermediate values of a chunk for one prompt, each computed from the engine's values.

Every half of a layer gets the engine's input in place of its own, so that a difference shows in the
place that causes it and does not grow through the layers after it. The names are those of
`reshard.verify.layer_mismatch`. Layers of Transformer Engine join norms and linear layers, and lack
some of the points.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.reshard.verify.layer_mismatch import layer_point

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np


@contextmanager
def probe_chunk(
    chunk: torch.nn.Module, engine_values: Mapping[str, np.ndarray]
) -> Iterator[dict[str, np.ndarray]]:
    """Record the values of the passes inside the context.

    Args:
        chunk: The only chunk of a model on one rank.
        engine_values: The engine's values for the same tokens, `[N, ...]` each.

    Yields:
        The values, `[N, ...]` float32 each.
    """
    probe = _ChunkProbe(engine_values)
    try:
        probe.watch(chunk)
        yield probe.values
    finally:
        for handle in probe.handles:
            handle.remove()


class _ChunkProbe:
    def __init__(self, engine_values: Mapping[str, np.ndarray]) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.handles: list[Any] = []
        self._engine_values = engine_values

    def watch(self, chunk: Any) -> None:
        """Add the hooks."""
        self._watch(chunk.embedding, "embedding")
        for number, layer in enumerate(chunk.decoder.layers):
            self._watch_layer(layer, number)
        self._watch_norm(chunk.decoder.final_layernorm, "final_input", "final_norm")
        # The output layer is computed from the engine's hidden states.
        self._hook(
            chunk.decoder.final_layernorm,
            lambda _, __, output: self._engine_value("final_norm", output),
        )

    def _watch_layer(self, layer: Any, number: int) -> None:
        def name(point: str) -> str:
            return layer_point(number, point)

        def replace_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = "hidden_states"
            own = kwargs[key] if key in kwargs else args[0]
            own = self._engine_value(name("input"), own)
            return (args, kwargs | {key: own}) if key in kwargs else ((own, *args[1:]), kwargs)

        def keep_attention(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            for index, point in enumerate(("query", "key", "value")):
                self._keep(name(point), kwargs[point] if point in kwargs else args[index])
            self._keep(name("attention"), out)

        attention = layer.self_attention
        self.handles.append(layer.register_forward_pre_hook(replace_input, with_kwargs=True))
        self._watch(layer.input_layernorm, name("attention_norm"))
        self.handles.append(
            attention.core_attention.register_forward_hook(keep_attention, with_kwargs=True)
        )
        self._watch(attention.linear_proj, name("attention_output"))
        self._watch_norm(layer.pre_mlp_layernorm, name("mlp_input"), name("mlp_norm"))
        self._watch(layer.mlp, name("mlp"))
        if hasattr(layer.mlp, "router"):
            self._hook(
                layer.mlp.router,
                lambda _, __, output: self._keep(name("experts"), _chosen_experts(output[1])),
            )

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        def keep(_: Any, __: Any, output: Any) -> None:
            self._keep(name, output[0] if isinstance(output, tuple) else output)

        self._hook(module, keep)

    def _watch_norm(self, norm: torch.nn.Module, input_name: str, output_name: str) -> None:
        """Record a norm, which gets the engine's input."""
        replace = norm.register_forward_pre_hook(
            lambda _, inputs: (self._engine_value(input_name, inputs[0]), *inputs[1:])
        )
        self.handles.append(replace)
        self._watch(norm, output_name)

    def _hook(self, module: torch.nn.Module, hook: Any) -> None:
        self.handles.append(module.register_forward_hook(hook))

    def _keep(self, name: str, value_S1: torch.Tensor) -> None:
        """Keep `[S, 1, ...]` or `[S, ...]` values."""
        self.values[name] = value_S1.detach().float().flatten(1).cpu().numpy().copy()

    def _engine_value(self, name: str, own: torch.Tensor) -> torch.Tensor:
        value = self._engine_values.get(name)
        if value is None:
            return own
        return torch.from_numpy(value[: len(own)]).to(own).view_as(own)


def _chosen_experts(routing_map_SE: torch.Tensor) -> torch.Tensor:
    """Return the `[S, K]` experts of a mask."""
    return routing_map_SE.nonzero()[:, 1].view(len(routing_map_SE), -1)
