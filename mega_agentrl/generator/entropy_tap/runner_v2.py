"""Entropy tap for vLLM's V2 model runner (the default on GPUs).

Every request keeps one slot while it is in the batch, and every row of the logits has the index of
a slot. The position of a row is the number of its tokens minus those of the prompt. It is negative
during a partial prefill; such rows are skipped. Speculative decoding (several rows per request) is
not supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from mega_agentrl.generator.entropy_tap.tap_store import (
    MIN_TEMPERATURE,
    TAP_KEY_ARG,
    TAP_STORE,
    measure_logits,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState


class EntropyTapV2(LogitsProcessor):
    """Records entropy, log-prob shift and arg-max of every row whose slot has a key."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._request_states = req_states
        self._key_by_slot: list[str | None] = [None] * req_states.max_num_reqs
        self._temperature_by_slot = torch.ones(req_states.max_num_reqs)
        self._is_recording = get_tensor_model_parallel_rank() == 0

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Assign a slot; return whether its rows must be passed to `apply`."""
        key = (sampling_params.extra_args or {}).get(TAP_KEY_ARG) if self._is_recording else None
        self._key_by_slot[req_idx] = key
        if key is None:
            return False
        TAP_STORE.open(key)
        greedy = sampling_params.temperature < MIN_TEMPERATURE
        self._temperature_by_slot[req_idx] = 1.0 if greedy else sampling_params.temperature
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Record measurements and return the logits unchanged."""
        slots = ctx.idx_mapping_np.tolist()
        if not self._is_recording or len(slots) != logits.shape[0]:
            return logits
        rows = []
        for index, slot in enumerate(slots):
            num_visible = int(ctx.seq_lens_upper_bound_np[index])
            position = num_visible - int(self._request_states.prompt_len.np[slot])
            if (key := self._key_by_slot[slot]) is not None and position >= 0:
                rows.append((key, position, index))
        if rows:
            temperature_R = self._temperature_by_slot[slots]
            unit = bool((temperature_R == 1.0).all())
            device_R = None if unit else temperature_R.to(logits.device, non_blocking=True)
            TAP_STORE.record(measure_logits(logits, device_R), rows)
        return logits
