"""Exact token entropies, computed from the full-vocabulary logits inside the engine.

For a row of logits l sampled at temperature T, with z = l / T and p = softmax(z):

    entropy  H = -sum_v p_v log p_v                       nats, before top-k and top-p
    shift    s = LSE(l) / T - LSE(z)                      LSE = log-sum-exp over the vocabulary
    log-prob log p_y = raw_y / T + s                      raw_y = l_y - LSE(l), reported by vLLM

A greedy request (T = 0) is measured at T = 1, where s = 0. The measurements of one step stay in one
tensor on the device until they are read, so the tap never waits for a GPU.

A value belongs to a position of a request: the number of tokens sampled before. The values of
partial prefills and of steps that the scheduler discards are thus overwritten, and those of a step
past the end of a request are never read.

`runner_v1` and `runner_v2` record from vLLM's two model runners; `worker_extension` returns the
records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

TAP_KEY_ARG = "mega_agentrl_key"
"""Key in `SamplingParams.extra_args` whose value identifies the request to the tap."""

MIN_TEMPERATURE = 1e-5
"""vLLM's limit below which a request is greedy."""


@dataclass(frozen=True, slots=True)
class TapRecord:
    """Measurements of one request, by position; all fields have equal length."""

    entropies: tuple[float, ...]
    """Exact entropies in nats."""
    logp_shifts: tuple[float, ...]
    """Shifts from raw log-probs to those at the sampling temperature."""
    argmax_ids: tuple[int, ...]
    """Most probable token ids."""


def measure_logits(logits_RV: torch.Tensor, temperature_R: torch.Tensor | None) -> torch.Tensor:
    """Measure `[R, V]` float32 logits.

    Args:
        logits_RV: Raw logits.
        temperature_R: `[R]` float32 temperatures > 0, or None if all are 1.

    Returns:
        `[3, R]` float64: entropy, shift and arg-max id.
    """
    scaled_RV = logits_RV
    shift_R = torch.zeros(logits_RV.shape[0], device=logits_RV.device)
    if temperature_R is not None:
        scaled_RV = logits_RV / temperature_R[:, None]
        shift_R = logits_RV.logsumexp(-1) / temperature_R - scaled_RV.logsumexp(-1)
    entropy_R = torch.special.entr(scaled_RV.softmax(-1)).sum(-1)
    argmax_R = logits_RV.argmax(-1)
    return torch.stack([entropy_R.double(), shift_R.double(), argmax_R.double()])


class _StepMeasurements:
    """Measurements of one engine step, copied from the device on first use."""

    __slots__ = ("_values_3R", "_values_on_host")

    def __init__(self, values_3R: torch.Tensor) -> None:
        self._values_3R: torch.Tensor | None = values_3R
        self._values_on_host: list[list[float]] | None = None

    def row(self, index: int) -> tuple[float, float, int]:
        """Return entropy, shift and arg-max id of one row."""
        if self._values_on_host is None:
            assert self._values_3R is not None
            self._values_on_host = self._values_3R.tolist()
            self._values_3R = None
        entropy, shift, argmax = self._values_on_host
        return entropy[index], shift[index], int(argmax[index])


class TapStore:
    """Measurements by request key and position, kept until `take`."""

    def __init__(self) -> None:
        self.num_measured_tokens = 0
        """Tokens of open requests that have been measured."""
        self._records: dict[str, dict[int, tuple[_StepMeasurements, int]]] = {}

    def open(self, key: str) -> None:
        """Accept measurements of a request from now on; existing ones are kept."""
        self._records.setdefault(key, {})

    def record(self, values_3R: torch.Tensor, rows: Iterable[tuple[str, int, int]]) -> None:
        """Record one step; keys that are not open are ignored, because their records were taken.

        Args:
            values_3R: Result of `measure_logits`.
            rows: (request key, position, column of `values_3R`).
        """
        step = _StepMeasurements(values_3R)
        records = self._records
        for key, position, row in rows:
            if (record := records.get(key)) is not None:
                record[position] = (step, row)
                self.num_measured_tokens += 1

    def read(self, key: str) -> TapRecord:
        """Return everything from position 0 to the first gap; empty for an unknown key."""
        record = self._records.get(key, {})
        rows = []
        for position in range(len(record)):
            if (entry := record.get(position)) is None:
                break
            step, row = entry
            rows.append(step.row(row))
        return TapRecord(
            entropies=tuple(row[0] for row in rows),
            logp_shifts=tuple(row[1] for row in rows),
            argmax_ids=tuple(row[2] for row in rows),
        )

    def take(self, key: str) -> TapRecord:
        """Return the record of a request and delete it."""
        result = self.read(key)
        self._records.pop(key, None)
        return result

    def __len__(self) -> int:
        return len(self._records)


TAP_STORE = TapStore()
"""The store of this worker process."""
