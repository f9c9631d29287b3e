"""vLLM's arguments for an engine; what it reads from its environment is in `environment`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from mega_agentrl.generator.plugin import TRANSFER_BACKEND

if TYPE_CHECKING:
    from mega_agentrl.config.schema import EngineConfig

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU, whose attention takes multiples of 32 only: the smallest one, as
forks share whole blocks. On a GPU vLLM chooses for its attention."""


def engine_args(
    config: EngineConfig,
    model_path: str,
    *,
    seed: int,
    dtype: str | None,
    deterministic: bool = False,
    colocated: bool = False,
) -> AsyncEngineArgs:
    """vLLM's arguments. deterministic: no request shares a batch or a cached prefix.

    colocated: it can sleep, where there is a GPU to give up (see `sleep`).
    """
    on_gpu = torch.cuda.is_available()
    # A prompt that is cut between two steps samples a token too many, whose draw vLLM takes back
    # from the seeded generator of the request; a CPU's cannot give it back, and the engine dies.
    options: dict[str, Any] = {"block_size": CPU_BLOCK_TOKENS, "enable_chunked_prefill": False}
    if on_gpu:
        options = {
            "gpu_memory_utilization": config.memory_fraction,
            "enable_sleep_mode": colocated,
        }
    tap = "tap_v2:EntropyTapV2" if on_gpu else "tap_v1:EntropyTapV1"
    return AsyncEngineArgs(
        model=model_path,
        dtype=dtype or ("bfloat16" if on_gpu else "float32"),
        seed=seed,
        tensor_parallel_size=config.tensor,
        # Left to vLLM, workers would become Ray actors where the policy's place holds the engine.
        distributed_executor_backend="mp" if config.tensor > 1 else None,
        max_model_len=config.max_model_len,
        max_num_seqs=1 if deterministic else config.max_concurrent,
        max_num_batched_tokens=max(8192, config.max_model_len),
        enforce_eager=config.eager or not on_gpu,
        enable_prefix_caching=not deterministic,
        disable_log_stats=True,
        logits_processors=[f"mega_agentrl.generator.{tap}"],
        worker_extension_cls="mega_agentrl.generator.worker_extension.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        **options,
    )
