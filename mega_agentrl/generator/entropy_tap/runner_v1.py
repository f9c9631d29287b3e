"""Entropy tap for vLLM's V1 model runner (the one on CPUs).

vLLM calls `update_state` when rows of its batch change, and `apply` with the logits of the batch
(row i = batch index i) after the raw log-probs were taken and before temperature, top-k and top-p.
The tap changes no logits. Only tensor-parallel rank 0 records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from mega_agentrl.estimate.host_memory import PROCESS_MEMORY
from mega_agentrl.generator.entropy_tap.tap_store import (
    MIN_TEMPERATURE,
    TAP_KEY_ARG,
    TAP_STORE,
    measure_logits,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate


@dataclass(slots=True)
class _BatchRow:
    """One row of the batch."""

    key: str
    temperature: float
    output_ids: list[int]
    """vLLM's list of sampled tokens, which grows."""


class EntropyTapV1(LogitsProcessor):
    """Records entropy, log-prob shift and arg-max of every row that has a key."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        # The first object of this project in a worker: libraries are loaded, the model is not.
        PROCESS_MEMORY.start()
        self._device = device
        self._rows: dict[int, _BatchRow] = {}
        self._temperature_R: torch.Tensor | None = None
        self._is_recording = get_tensor_model_parallel_rank() == 0

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM runs the tap for greedy requests too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track the rows that vLLM added, removed and moved."""
        if not self._is_recording:
            return
        if process_dict_updates(self._rows, batch_update, _make_batch_row):
            self._temperature_R = None
            size = batch_update.batch_size
            temperatures = [1.0] * size
            for index, row in self._rows.items():
                temperatures[index] = row.temperature
            if any(temperature != 1.0 for temperature in temperatures):
                self._temperature_R = torch.tensor(temperatures, device=self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Record measurements and return the logits unchanged."""
        if not self._rows:
            return logits
        num_rows = logits.shape[0]
        temperature_R = self._temperature_R
        values_3R = measure_logits(
            logits, None if temperature_R is None else temperature_R[:num_rows]
        )
        TAP_STORE.record(
            values_3R,
            ((row.key, len(row.output_ids), index) for index, row in self._rows.items()),
        )
        return logits


def _make_batch_row(
    params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
) -> _BatchRow | None:
    key = (params.extra_args or {}).get(TAP_KEY_ARG)
    if key is None:
        return None
    if not output_ids:
        TAP_STORE.open(key)
    temperature = params.temperature if params.temperature >= MIN_TEMPERATURE else 1.0
    return _BatchRow(key, temperature, output_ids)
