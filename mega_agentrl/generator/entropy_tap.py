"""Exact token entropies, computed from the full-vocabulary logits inside vLLM's workers.

For a row of logits l sampled at temperature T, with z = l / T and p = softmax(z):

    entropy  H = -sum_v p_v log p_v                       nats, before top-k and top-p
    shift    s = LSE(l) / T - LSE(z)                      LSE = log-sum-exp over the vocabulary
    log-prob log p_y = raw_y / T + s                      raw_y = l_y - LSE(l), reported by vLLM

A greedy request (T = 0) is measured at T = 1, where s = 0.

The values travel in vLLM's own output of a step. Every request asks for the log-prob of its sampled
tokens, which vLLM reports as (token id, log-prob, rank). The tap replaces the id and the rank:

    token id -> id of the most probable token             vLLM reports the sampled ids elsewhere
    rank     -> the bits of two float32, (s, -H)          an int64, negative unlike any rank

The measurements are thus copied from the device with the sampled tokens and follow them through the
scheduler, even if a request is preempted, aborted or held. The workers store nothing, and no call
has to fetch measurements from them, which would interrupt vLLM's asynchronous scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.sampler import Sampler as SamplerV1

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu.input_batch import InputBatch

MIN_TEMPERATURE = 1e-5
"""vLLM's limit below which a request is greedy."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of the rows of one step, each `[R]`."""

    entropy_R: torch.Tensor
    """Exact entropies in nats, float32."""
    shift_R: torch.Tensor
    """Shifts from raw log-probs to those at the sampling temperature, float32."""
    argmax_R: torch.Tensor
    """Most probable token ids, int64."""


@dataclass(frozen=True, slots=True)
class TapRecord:
    """Measurements of one request, by position; all fields have equal length."""

    entropies: tuple[float, ...] = ()
    """Exact entropies in nats."""
    logp_shifts: tuple[float, ...] = ()
    """Shifts from raw log-probs to those at the sampling temperature."""
    argmax_ids: tuple[int, ...] = ()
    """Most probable token ids."""


def measure_logits(logits_RV: torch.Tensor, temperature_R: torch.Tensor | None) -> Measurements:
    """Measure `[R, V]` float32 logits.

    Args:
        logits_RV: Raw logits.
        temperature_R: `[R]` float32 temperatures, or None if all are 1 or greedy.
    """
    scaled_RV = logits_RV
    shift_R = torch.zeros(logits_RV.shape[0], device=logits_RV.device)
    if temperature_R is not None:
        temperature_R = temperature_R.where(temperature_R >= MIN_TEMPERATURE, 1.0)
        scaled_RV = logits_RV / temperature_R[:, None]
        shift_R = logits_RV.logsumexp(-1) / temperature_R - scaled_RV.logsumexp(-1)
    entropy_R = torch.special.entr(scaled_RV.softmax(-1)).sum(-1)
    return Measurements(entropy_R, shift_R, logits_RV.argmax(-1))


def attach_measurements(tensors: LogprobsTensors, measurements: Measurements) -> LogprobsTensors:
    """Return the log-probs of a step with the measurements of its rows.

    Args:
        tensors: vLLM's log-probs: `[R, 1 + K]` ids, of which the first is the sampled token.
        measurements: Measurements of the same rows.
    """
    # Rounding may leave an entropy of 0 slightly below it.
    negative_R = torch.copysign(measurements.entropy_R.clamp_min(0.0), -1.0)
    bits_R = torch.stack([measurements.shift_R, negative_R], dim=-1).view(torch.int64).squeeze(-1)
    ids = tensors.logprob_token_ids  # may share its memory with the sampled ids
    ids = torch.cat([measurements.argmax_R[:, None].to(ids.dtype), ids[:, 1:]], dim=1)
    return tensors._replace(logprob_token_ids=ids, selected_token_ranks=bits_R)


def read_measurements(logprobs: FlatLogprobs | None) -> TapRecord:
    """Return the measurements in the log-probs that vLLM has returned for a request.

    Raises:
        RuntimeError: If a log-prob comes without a measurement.
    """
    if not logprobs:
        return TapRecord()
    starts = logprobs.start_indices
    bits_T = np.array([logprobs.ranks[start] for start in starts], dtype=np.int64)
    if (bits_T >= 0).any():
        position = int((bits_T >= 0).argmax())
        raise RuntimeError(
            f"token {position} of {len(starts)} has rank {bits_T[position]}, expected an entropy; "
            "probable cause: the worker samples without the entropy tap"
        )
    values_T2 = bits_T.view(np.float32).reshape(-1, 2)
    return TapRecord(
        entropies=tuple(np.abs(values_T2[:, 1]).tolist()),
        logp_shifts=tuple(values_T2[:, 0].tolist()),
        argmax_ids=tuple(logprobs.token_ids[start] for start in starts),
    )


def tap_sampler(sampler: Any) -> TappedSamplerV1 | TappedSamplerV2:
    """Return a tapped sampler to replace `sampler` in either of vLLM's two model runners."""
    return (TappedSamplerV1 if isinstance(sampler, SamplerV1) else TappedSamplerV2)(sampler)


class _TappedSampler:
    """Wraps a sampler of vLLM, which provides all attributes that a subclass does not define.

    Subclasses measure logits before they sample, because a sampler may change logits in place.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class TappedSamplerV1(_TappedSampler):
    """The sampler of the V1 model runner, which is used on CPUs."""

    def __call__(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, **options: Any
    ) -> SamplerOutput:
        """Sample `[R, V]` logits."""
        measurements = None
        if sampling_metadata.max_num_logprobs is not None:
            temperature_R = sampling_metadata.temperature  # None if all requests are greedy
            if temperature_R is not None and bool((temperature_R == 1.0).all()):
                temperature_R = None
            measurements = measure_logits(logits.float(), temperature_R)
        output: SamplerOutput = self._sampler(logits, sampling_metadata, **options)
        if measurements is not None:
            output.logprobs_tensors = attach_measurements(output.logprobs_tensors, measurements)
        return output


class TappedSamplerV2(_TappedSampler):
    """The sampler of the V2 model runner, which is used on GPUs. It never waits for the device.

    Speculative decoding, which samples elsewhere, is not supported.
    """

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> Any:
        """Sample `[R, V]` logits; row i belongs to request slot `expanded_idx_mapping[i]`."""
        slots = input_batch.idx_mapping_np
        measurements = None
        if self._sampler.get_logprobs_dims(slots) is not None:
            temperatures, temperature_R = self._sampler.sampling_states.temperature, None
            if not np.isin(temperatures.np[slots], (0.0, 1.0)).all():
                temperature_R = temperatures.gpu[input_batch.expanded_idx_mapping]
            measurements = measure_logits(logits.float(), temperature_R)
        output = self._sampler(logits, input_batch)
        if measurements is not None:
            output.logprobs_tensors = attach_measurements(output.logprobs_tensors, measurements)
        return output
