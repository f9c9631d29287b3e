"""Conversion between the project's requests and vLLM's sampling parameters and results.

A stop string that is a single token of the vocabulary is detected by its id inside the engine,
which costs nothing; it is not detected if the policy spells it out of smaller tokens. Any other
stop string makes vLLM decode every token of the request to text in the hosting process. Stop
strings stay in the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from mega_agentrl.errors import InputError
from mega_agentrl.generator.entropy_tap import read_measurements
from mega_agentrl.types.records import FinishReason, GenerateRequest, Generation
from mega_agentrl.types.routes import TokenRoutes

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from mega_agentrl.reshard.mapping.model_shape import MoeShape


@dataclass(slots=True)
class StopTokenTable:
    """Token id of every stop string that is one token; None for the others."""

    tokenizer: Any
    _id_by_string: dict[str, int | None] = field(default_factory=dict)

    def token_id(self, stop: str) -> int | None:
        """Return the id of `stop` if it is exactly one token."""
        if stop not in self._id_by_string:
            ids = self.tokenizer.encode(stop, add_special_tokens=False)
            self._id_by_string[stop] = ids[0] if len(ids) == 1 else None
        return self._id_by_string[stop]

    def split_stop_strings(self, stops: tuple[str, ...]) -> tuple[dict[int, str], list[str]]:
        """Return the stop strings that are one token, by id, and all others."""
        by_id = {self.token_id(stop): stop for stop in stops}
        others = [stop for stop in stops if self.token_id(stop) is None]
        return {key: stop for key, stop in by_id.items() if key is not None}, others


def check_request(request: GenerateRequest, max_model_len: int) -> None:
    """Raise `ValueError` for requests that vLLM would reject less readably or not at all."""
    num_prompt = len(request.token_ids)
    if not 1 <= num_prompt < max_model_len:
        raise InputError(
            f"request {request.request_id}: prompt tokens",
            num_prompt,
            f"1 to {max_model_len - 1}, as engine.max_model_len={max_model_len}",
        )
    if request.max_tokens < 1:
        name = f"request {request.request_id}: max_tokens"
        raise InputError(name, request.max_tokens, "at least 1")


def sampling_params(
    request: GenerateRequest,
    stop_ids: dict[int, str],
    stop_strings: list[str],
    banned_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """Return vLLM's parameters, with log-probs in any case, because the entropy tap needs them.

    Args:
        request: The request.
        stop_ids: Stop strings that are one token, by id.
        stop_strings: All other stop strings.
        banned_ids: Tokens that are never sampled. vLLM adds minus infinity to their logits after
            log-probs and entropies have been measured, so that these are of all tokens, like those
            of a request with top-k or top-p.
    """
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=stop_strings or None,
        stop_token_ids=list(stop_ids) or None,
        include_stop_str_in_output=True,
        detokenize=bool(stop_strings),
        logprobs=request.num_top_logps,
        logit_bias=dict.fromkeys(banned_ids, -math.inf) or None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        routed_experts_prompt_start=(
            len(request.token_ids) if request.routes_start is None else request.routes_start
        ),
    )


def prompt_logp_params() -> SamplingParams:
    """Return parameters that only score a prompt, at temperature 1."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )


def to_generation(
    request: GenerateRequest,
    output: CompletionOutput,
    stop_ids: dict[int, str],
    version: int,
    num_cached: int = 0,
    routes: TokenRoutes | None = None,
) -> Generation:
    """Return the `Generation` of vLLM's output, including the entropy tap's measurements.

    `version` is the weight version to report if no token was sampled.
    """
    versions = _token_versions(output)
    record = read_measurements(output.logprobs)
    finish_reason, stop_string = _finish_reason(output, stop_ids)
    return Generation(
        request_id=request.request_id,
        token_ids=tuple(output.token_ids),
        logps=record.logps,
        entropies=record.entropies,
        argmax_ids=record.argmax_ids,
        finish_reason=finish_reason,
        stop_string=stop_string,
        version=versions[-1] if versions else version,
        top_logps=_top_logps(request, output),
        num_cached_tokens=num_cached,
        versions=versions if len(set(versions)) > 1 else (),
        routes=routes,
    )


def to_routes(
    request: GenerateRequest, output: CompletionOutput, moe: MoeShape
) -> TokenRoutes | None:
    """Return the routes that came with vLLM's output; None if the request asks for none.

    Raises:
        RuntimeError: vLLM returned routes of other tokens than it computed.
    """
    if request.routes_start is None or not output.token_ids:
        return None
    token_ids = (*request.token_ids, *output.token_ids)[request.routes_start : -1]
    expert_NLK = output.routed_experts
    num_routes = 0 if expert_NLK is None else len(expert_NLK)
    if expert_NLK is None or num_routes != len(token_ids):
        raise RuntimeError(
            f"request {request.request_id}: got the experts of {num_routes} tokens, expected "
            f"{len(token_ids)}, those of the context from token {request.routes_start} and of the "
            f"{len(output.token_ids)} sampled tokens but the last; probable cause: a version of "
            "vLLM with another capture of experts"
        )
    return TokenRoutes.from_experts(
        expert_NLK[:, np.flatnonzero(moe.moe_layer_pattern)],
        token_ids,
        moe.num_experts,
        start=request.routes_start,
    )


def aborted_generation(request: GenerateRequest, version: int) -> Generation:
    """Return the empty `Generation` of a request that was aborted before vLLM had it."""
    return Generation(
        request_id=request.request_id,
        token_ids=(),
        logps=(),
        entropies=(),
        argmax_ids=(),
        finish_reason=FinishReason.aborted,
        stop_string=None,
        version=version,
    )


def _token_versions(output: CompletionOutput) -> tuple[int, ...]:
    """Return the weight version that sampled each token, from vLLM's labels of token spans."""
    return tuple(
        int(span.version)
        for span in output.weight_versions or ()
        for _ in range(span.start, span.end)
    )


def _top_logps(request: GenerateRequest, output: CompletionOutput) -> tuple[tuple[float, ...], ...]:
    """Return the log-probs at temperature 1 of each sampled token and the most probable ones.

    vLLM lists the sampled token first, and again if it is one of the most probable. The entropy tap
    replaces the first id.
    """
    flat = output.logprobs
    if not flat or not request.num_top_logps:
        return ()
    slices = [slice(*ends) for ends in zip(flat.start_indices, flat.end_indices, strict=True)]
    logp_by_id_T = [
        dict(zip((token_id, *flat.token_ids[positions][1:]), flat.logprobs[positions], strict=True))
        for token_id, positions in zip(output.token_ids, slices, strict=True)
    ]
    return tuple(tuple(choices.values()) for choices in logp_by_id_T)


def _finish_reason(
    output: CompletionOutput, stop_ids: dict[int, str]
) -> tuple[FinishReason, str | None]:
    if output.finish_reason == "length":
        return FinishReason.length, None
    if output.finish_reason == "stop":
        if isinstance(output.stop_reason, str):
            return FinishReason.stop, output.stop_reason
        if output.stop_reason in stop_ids:
            return FinishReason.stop, stop_ids[output.stop_reason]
        # The model's end token, or another id of its generation config.
        return FinishReason.eos, None
    return FinishReason.aborted, None
