"""Intermediate values of vLLM's decoder for one prompt, to compare with the policy's.

The names are those of `reshard.verify.layer_mismatch`. Values are complete on each worker only
without tensor parallelism, and hooks run only in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.reshard.verify.layer_mismatch import layer_point

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


class LayerProbe:
    """Records the values of the next pass over exactly `num_tokens` tokens."""

    def __init__(self, model: Any, num_tokens: int) -> None:
        self.values: dict[str, np.ndarray] = {}
        self._num_tokens = num_tokens
        self._undo: list[Callable[[], None]] = []
        model = getattr(model, "language_model", model)
        decoder = model.model
        self._watch(decoder.embed_tokens, "embedding")
        for number, layer in enumerate(decoder.layers):
            self._watch_layer(layer, number)
        self._watch_norm(decoder.norm, "final_input", "final_norm")

    def close(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()

    def _watch_layer(self, layer: Any, number: int) -> None:
        def name(point: str) -> str:
            return layer_point(number, point)

        def keep_attention(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for point, value in zip(("query", "key", "value"), inputs, strict=False):
                self._keep(name(point), value)
            self._keep(name("attention"), output)

        self._watch_norm(layer.input_layernorm, name("input"), name("attention_norm"))
        self._hook(layer.self_attn.attn, keep_attention)
        self._watch(layer.self_attn.o_proj, name("attention_output"))
        self._watch_norm(layer.post_attention_layernorm, name("mlp_input"), name("mlp_norm"))
        self._watch(layer.mlp, name("mlp"))
        if (router := getattr(getattr(layer.mlp, "experts", None), "router", None)) is not None:
            self._watch_router(router, name("experts"))

    def _watch_router(self, router: Any, name: str) -> None:
        capture = router.capture_fn

        def keep_experts(experts: torch.Tensor) -> None:
            self._keep(name, experts)
            if capture is not None:
                capture(experts)

        router.set_capture_fn(keep_experts)
        self._undo.append(lambda: router.set_capture_fn(capture))

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        self._hook(module, lambda _, __, output: self._keep(name, _first(output)))

    def _watch_norm(self, norm: torch.nn.Module, input_name: str, output_name: str) -> None:
        """Record a norm; with two arguments it adds them first and returns the sum, too."""

        def keep_norm(_: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            self._keep(input_name, output[1] if isinstance(output, tuple) else inputs[0])
            self._keep(output_name, _first(output))

        self._hook(norm, keep_norm)

    def _hook(self, module: torch.nn.Module, hook: Any) -> None:
        self._undo.append(module.register_forward_hook(hook).remove)

    def _keep(self, name: str, value: torch.Tensor) -> None:
        # vLLM computes norms in place.
        if len(value) == self._num_tokens:
            self.values[name] = value.detach().flatten(1).float().cpu().numpy().copy()


def _first(output: Any) -> torch.Tensor:
    value: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return value
