r"""Exact token entropies, read off the full-vocabulary logits inside the engine.

For a row of logits l sampled at temperature T, with z = l / T and p = softmax(z):

    entropy  H = -sum_v p_v log p_v                       nats, before top-k and top-p
    shift    s = LSE(l) / T - LSE(z)                      LSE = log-sum-exp over the vocabulary
    log-prob log p_y = raw_y / T + s                      raw_y = l_y - LSE(l), vLLM's own report

A greedy request (T = 0) is measured at T = 1, where s = 0. The numbers of one step stay in one
tensor on the device until somebody asks for them, so nothing here waits for a GPU.

A value belongs to a position of a request: number of tokens it had sampled before. Partial
prefills and steps that the scheduler throws away are thus overwritten by the real one, and a
step past a stop lies beyond what the frontend asks for.

This is the shared core: `measure` (maths), `TapStore` (bookkeeping). `tap_v1` and `tap_v2` feed
it from vLLM's two model runners, `worker_extension` hands its contents out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EXTRA_ARG = "mega_agentrl_key"
"""Key in `SamplingParams.extra_args` whose value names the request to the tap."""

MIN_TEMPERATURE = 1e-5
"""vLLM's own limit below which a request is greedy."""


@dataclass(frozen=True, slots=True)
class TapRecord:
    """What was measured for one request; all fields have one length, positions from 0 on."""

    entropies: tuple[float, ...]
    shifts: tuple[float, ...]
    argmax_ids: tuple[int, ...]


def measure(logits_RV: torch.Tensor, temperature_R: torch.Tensor | None) -> torch.Tensor:
    """[R, V] float32 logits, [R] float32 temperatures > 0 -> [3, R] float64.

    Rows of the result: entropy, shift, arg-max id. `temperature_R` None stands for all 1.
    """
    scaled_RV = logits_RV
    shift_R = torch.zeros(logits_RV.shape[0], device=logits_RV.device)
    if temperature_R is not None:
        scaled_RV = logits_RV / temperature_R[:, None]
        shift_R = logits_RV.logsumexp(-1) / temperature_R - scaled_RV.logsumexp(-1)
    entropy_R = torch.special.entr(scaled_RV.softmax(-1)).sum(-1)
    argmax_R = logits_RV.argmax(-1)
    return torch.stack([entropy_R.double(), shift_R.double(), argmax_R.double()])


class _Step:
    """Measurements of one engine step; copied off the device on first use."""

    __slots__ = ("_lists", "_values_3R")

    def __init__(self, values_3R: torch.Tensor) -> None:
        self._values_3R: torch.Tensor | None = values_3R
        self._lists: list[list[float]] | None = None

    def row(self, index: int) -> tuple[float, float, int]:
        """Entropy, shift and arg-max id of one row."""
        if self._lists is None:
            assert self._values_3R is not None
            self._lists = self._values_3R.tolist()
            self._values_3R = None
        entropy, shift, argmax = self._lists
        return entropy[index], shift[index], int(argmax[index])


class TapStore:
    """Measurements by request key and position; kept until `take` or `drop`.

    num_measured: tokens of open requests so far.
    """

    def __init__(self) -> None:
        self.num_measured = 0
        self._records: dict[str, dict[int, tuple[_Step, int]]] = {}

    def open(self, key: str) -> None:
        """Accept measurements for a request from now on; what it has is kept."""
        self._records.setdefault(key, {})

    def record(self, values_3R: torch.Tensor, rows: Iterable[tuple[str, int, int]]) -> None:
        """Note one step: `rows` are (request key, position, row of `values_3R`).

        Keys that are not open are ignored: the frontend has given them up already.
        """
        step = _Step(values_3R)
        records = self._records
        for key, position, row in rows:
            if (record := records.get(key)) is not None:
                record[position] = (step, row)
                self.num_measured += 1

    def read(self, key: str) -> TapRecord:
        """Everything from position 0 up to the first gap; empty for an unknown key."""
        record = self._records.get(key, {})
        rows = []
        for position in range(len(record)):
            if (place := record.get(position)) is None:
                break
            rows.append(place[0].row(place[1]))
        return TapRecord(
            entropies=tuple(row[0] for row in rows),
            shifts=tuple(row[1] for row in rows),
            argmax_ids=tuple(row[2] for row in rows),
        )

    def take(self, key: str) -> TapRecord:
        """`read`, then forget the request."""
        result = self.read(key)
        self._records.pop(key, None)
        return result

    def drop(self, keys: Sequence[str]) -> None:
        """Forget requests."""
        for key in keys:
            self._records.pop(key, None)

    def __len__(self) -> int:
        return len(self._records)


STORE = TapStore()
"""The one store of a worker process."""
