"""Capture of routes in vLLM's V1 model runner, which is used on CPUs.

vLLM returns the experts of each token (`enable_return_routed_experts`) from its V2 model runner,
which needs Triton. Scheduler, stores and output processing do not depend on the runner; what the V1
runner lacks is added here, with vLLM's own connector: begin each step, take the experts that the
layers reported in it, and attach them to the output of the step. Prefix cache hits, preemption and
held requests are thus handled by vLLM. On a CPU nothing is copied or computed asynchronously, so
that the experts are complete when the step returns.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

from mega_agentrl.generator.vllm_compat import step_output

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class RouteCapture:
    """Replaces `execute_model` and `sample_tokens` of a V1 model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._connector = get_aux_output_connector(
            model=runner.get_model(),
            vllm_config=runner.vllm_config,
            kv_cache_config=runner.kv_cache_config,
        )
        self._execute_model, self._sample_tokens = runner.execute_model, runner.sample_tokens

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the tokens of a step."""
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return self._execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step's tokens, and return them with the experts of its inputs."""
        runner = self._runner
        if runner.execute_model_state is None:
            return self._sample_tokens(grammar_output)
        batch = runner.input_batch
        num_requests = batch.num_reqs
        # The fields of a batch of the V2 runner that the connector reads.
        pending = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=batch.req_ids[:num_requests],
                query_start_loc_np=runner.query_start_loc.np[: num_requests + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:num_requests].copy(),
            )
        )
        is_sampled = ~runner.discard_request_mask.np[:num_requests]
        output = self._sample_tokens(grammar_output)
        if pending is not None:
            pending.enqueue_cpu_copy(is_sampled.astype(np.int64), np.zeros(num_requests, np.int64))
            step_output(output).aux_output_connector_output = pending.process_output()
        return output


def install_route_capture(runner: Any) -> None:
    """Make a model runner return routes; the V2 runner does so by itself."""
    if hasattr(runner, "aux_output_connector"):
        return
    capture = RouteCapture(runner)
    runner.execute_model, runner.sample_tokens = capture.execute_model, capture.sample_tokens
