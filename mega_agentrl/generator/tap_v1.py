"""Feeds the entropy tap from vLLM's V1 model runner (the one on CPUs).

vLLM calls `update_state` when rows of its batch change and `apply` with the logits of the
batch, row i = batch index i, after the raw log-probs were taken and before temperature, top-k
and top-p. It changes no logit; it must also run for greedy requests and therefore declares
itself not invariant under arg-max. Only tensor-parallel rank 0 records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from mega_agentrl.estimate.measured import PROCESS
from mega_agentrl.generator.entropy_tap import EXTRA_ARG, MIN_TEMPERATURE, STORE, measure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate


@dataclass(slots=True)
class _Row:
    """One row of the batch. output_ids is vLLM's list of sampled tokens, which grows."""

    key: str
    temperature: float
    output_ids: list[int]


class EntropyTapV1(LogitsProcessor):
    """Records entropy, log-prob shift and arg-max of every row that carries a key."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        PROCESS.begin()  # the first of ours that a worker makes, libraries loaded and no model yet
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._temperature_R: torch.Tensor | None = None
        self._records = get_tensor_model_parallel_rank() == 0

    def is_argmax_invariant(self) -> bool:
        """False, so that vLLM runs it for greedy requests too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows that were added, removed and moved."""
        if not self._records:
            return
        if process_dict_updates(self._rows, batch_update, _new_row):
            self._temperature_R = None
            size = batch_update.batch_size
            temperatures = [1.0] * size
            for index, row in self._rows.items():
                temperatures[index] = row.temperature
            if any(temperature != 1.0 for temperature in temperatures):
                self._temperature_R = torch.tensor(temperatures, device=self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Record; the logits pass through untouched."""
        if not self._rows:
            return logits
        num_rows = logits.shape[0]
        temperature_R = self._temperature_R
        values_3R = measure(logits, None if temperature_R is None else temperature_R[:num_rows])
        STORE.record(
            values_3R,
            ((row.key, len(row.output_ids), index) for index, row in self._rows.items()),
        )
        return logits


def _new_row(
    params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
) -> _Row | None:
    key = (params.extra_args or {}).get(EXTRA_ARG)
    if key is None:
        return None
    if not output_ids:
        STORE.open(key)
    temperature = params.temperature if params.temperature >= MIN_TEMPERATURE else 1.0
    return _Row(key, temperature, output_ids)
