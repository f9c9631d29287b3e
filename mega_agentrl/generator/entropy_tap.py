"""Token log-probs and entropies, computed from the full-vocabulary logits in vLLM's workers.

For a row of logits l sampled at temperature T, with p = softmax(l / T) and the sampled token y:

    log-prob  log p_y                                     nats, before top-k and top-p
    entropy   H = -sum_v p_v log p_v                      nats, likewise

A greedy request (T = 0) is measured at T = 1.

The values travel in vLLM's own output of a step. Every request asks for the log-prob of its sampled
tokens, which vLLM reports as (token id, log-prob at T = 1, rank). The tap replaces the id and the
rank:

    token id -> id of the most probable token             vLLM reports the sampled ids elsewhere
    rank     -> the bits of two float32, (log p_y, -H)    an int64, negative unlike any rank

The measurements are thus copied from the device with the sampled tokens and follow them through the
scheduler, even if a request is preempted, aborted or held. The workers store nothing, and no call
has to fetch measurements from them, which would interrupt vLLM's asynchronous scheduling.

On GPUs one kernel reads the logits once (`entropy_kernel`). Where vLLM samples a part of the batch
on each tensor rank, the rank measures its part, and vLLM gathers the values with its log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.sampler import Sampler as SamplerV1

from mega_agentrl.numerics import layers as exact_layers

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu.input_batch import InputBatch

MIN_TEMPERATURE = 1e-5
"""vLLM's limit below which a request is greedy."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of the rows of one step, before a token is sampled from them."""

    logp_RV: torch.Tensor
    """`[R, V]` float32 log-probs of all tokens at the sampling temperature."""
    entropy_R: torch.Tensor
    """`[R]` float32 entropies in nats."""
    argmax_R: torch.Tensor
    """`[R]` int64 ids of the most probable tokens."""


@dataclass(frozen=True, slots=True)
class TapRecord:
    """Measurements of one request, by position; all fields have equal length."""

    logps: tuple[float, ...] = ()
    """Log-probs of the sampled tokens at the sampling temperature."""
    entropies: tuple[float, ...] = ()
    """Entropies in nats."""
    argmax_ids: tuple[int, ...] = ()
    """Most probable token ids."""


def measure_logits(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor | None, *, exact: bool = False
) -> Measurements:
    """Measure `[R, V]` float32 logits.

    Args:
        logits_RV: Raw logits.
        temperature_R: `[R]` float32 temperatures, or None if all are 1 or greedy.
        exact: Compute with `numerics`, as a policy with `model.zero_mismatch` does.
    """
    if temperature_R is not None:
        temperature_R = temperature_R.where(temperature_R >= MIN_TEMPERATURE, 1.0)
    if exact:
        logp_RV, entropy_R = exact_layers.log_probs_and_entropy(
            logits_RV, 1.0 if temperature_R is None else temperature_R.double()
        )
        logp_RV, entropy_R = logp_RV.float(), entropy_R.float()
    else:
        divisor_R1 = 1.0 if temperature_R is None else temperature_R[:, None]
        logp_RV = (logits_RV / divisor_R1).log_softmax(-1)
        entropy_R = torch.special.entr(logp_RV.exp()).sum(-1)
    return Measurements(logp_RV, entropy_R, logits_RV.argmax(-1))


def attach_measurements(tensors: LogprobsTensors, measurements: Measurements) -> LogprobsTensors:
    """Return the log-probs of a step with the measurements of its rows.

    Args:
        tensors: vLLM's log-probs: `[R, 1 + K]` ids, of which the first is the sampled token.
        measurements: Measurements of the same rows.
    """
    sampled_R1 = tensors.logprob_token_ids[:, :1].long()
    logp_R = measurements.logp_RV.gather(1, sampled_R1).squeeze(1)
    # Rounding may leave an entropy of 0 slightly below it.
    negative_R = torch.copysign(measurements.entropy_R.clamp_min(0.0), -1.0)
    bits_R = torch.stack([logp_R, negative_R], dim=-1).view(torch.int64).squeeze(-1)
    return _replace_ids_and_ranks(tensors, measurements.argmax_R, bits_R)


def _replace_ids_and_ranks(
    tensors: LogprobsTensors, argmax_R: torch.Tensor, bits_R: torch.Tensor
) -> LogprobsTensors:
    ids = tensors.logprob_token_ids  # not changed in place: may be the memory of the sampled ids
    ids = torch.cat([argmax_R[:, None].to(ids.dtype), ids[:, 1:]], dim=1)
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
        logps=tuple(values_T2[:, 0].tolist()),
        entropies=tuple(np.abs(values_T2[:, 1]).tolist()),
        argmax_ids=tuple(logprobs.token_ids[start] for start in starts),
    )


def tap_sampler(sampler: Any, *, exact: bool = False) -> TappedSamplerV1 | TappedSamplerV2:
    """Return a tapped sampler to replace `sampler` in either of vLLM's two model runners.

    With `exact` that of a CPU measures with `numerics`.
    """
    if isinstance(sampler, SamplerV1):
        return TappedSamplerV1(sampler, exact)
    return TappedSamplerV2(sampler)


class _TappedSampler:
    """Wraps a sampler of vLLM, which provides all attributes that a subclass does not define."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class TappedSamplerV1(_TappedSampler):
    """The sampler of the V1 model runner, which is used on CPUs.

    It measures logits before it samples, because the sampler changes them in place.
    """

    def __init__(self, sampler: SamplerV1, exact: bool) -> None:
        super().__init__(sampler)
        self._exact = exact

    def __call__(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, **options: Any
    ) -> SamplerOutput:
        """Sample `[R, V]` logits."""
        measurements = None
        if sampling_metadata.max_num_logprobs is not None:
            temperature_R = sampling_metadata.temperature  # None if all requests are greedy
            if temperature_R is not None and bool((temperature_R == 1.0).all()):
                temperature_R = None
            measurements = measure_logits(logits.float(), temperature_R, exact=self._exact)
        output: SamplerOutput = self._sampler(logits, sampling_metadata, **options)
        if measurements is not None:
            output.logprobs_tensors = attach_measurements(output.logprobs_tensors, measurements)
        return output


class TappedSamplerV2(_TappedSampler):
    """The sampler of the V2 model runner, which is used on GPUs. It never waits for the device.

    It measures logits after it has sampled: the sampler changes a copy of them, because it computes
    its own log-probs from the raw ones. Speculative decoding, which samples elsewhere, is not
    supported.
    """

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> Any:
        """Sample `[R, V]` logits; row i belongs to request slot `expanded_idx_mapping[i]`."""
        output = self._sampler(logits, input_batch)
        if (tensors := output.logprobs_tensors) is not None:
            # Imported here because it needs Triton.
            from mega_agentrl.generator.entropy_kernel import measure_sampled

            bits_R, argmax_R = measure_sampled(
                logits,
                tensors.logprob_token_ids[:, 0],
                self._sampler.sampling_states.temperature.gpu,
                input_batch.expanded_idx_mapping,
            )
            output.logprobs_tensors = _replace_ids_and_ranks(tensors, argmax_R, bits_R)
        return output
