"""Arguments of a vLLM engine; settings that vLLM reads from variables are in `environment`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.estimate.memory.engine import MIN_BATCHED_TOKENS
from mega_agentrl.generator.plugin import WEIGHT_TRANSFER_BACKEND

if TYPE_CHECKING:
    from mega_agentrl.config.sections.runtime import EngineConfig

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU: the smallest size that its attention accepts, a multiple of 32.

Forks share whole blocks. On a GPU, vLLM chooses the size for its attention.
"""


def engine_args(
    config: EngineConfig,
    model_path: str,
    *,
    seed: int,
    dtype: Dtype = Dtype.auto,
    load_weights: bool = False,
    deterministic: bool = False,
    colocated: bool = False,
    pixels_per_token: int | None = None,
    with_routes: bool = False,
) -> AsyncEngineArgs:
    """Return vLLM's arguments.

    Args:
        config: Engine settings.
        model_path: Model folder.
        seed: Seed of the engine.
        dtype: Dtype of weights and activations. The output layer multiplies the hidden states in
            this dtype but sums in float32, as the actor does, so that logits are not rounded.
        load_weights: Read the weights of the folder; else only its configuration and tokenizer,
            and the weights have random values.
        deterministic: Batch no requests together, and do not cache prefixes.
        colocated: Enable vLLM's sleep mode on a GPU (see `sleep_mode`).
        pixels_per_token: Pixels of an image for each of its tokens; None for a text model.
        with_routes: Return the experts of each token.

    Raises:
        ConfigError: `with_routes` and `deterministic` on a GPU, where vLLM returns experts only
            with a cache of prefixes.
    """
    on_gpu = torch.cuda.is_available()
    # A prompt that is split between two steps samples one token too many, and vLLM rewinds the
    # seeded generator of the request. A CPU generator cannot be rewound, and the engine dies.
    options: dict[str, Any] = {"block_size": CPU_BLOCK_TOKENS, "enable_chunked_prefill": False}
    # vLLM would replace the name "uni" on a CPU by a process per worker, whose imports make a start
    # several seconds longer. The environment, which the engine core inherits, sets its threads.
    single_worker: Any = UniProcExecutor
    if on_gpu:
        single_worker = None
        options = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": colocated,
        }
        if with_routes and deterministic:
            raise ConfigError(
                "model.router_replay",
                "sampled",
                "old or off with deterministic=true on GPUs",
                "vLLM returns the experts of tokens only if it caches prefixes, which "
                "deterministic runs do not",
            )
    if pixels_per_token is not None:
        options |= _image_options(config.max_model_len * pixels_per_token, on_gpu=on_gpu)
    return AsyncEngineArgs(
        model=model_path,
        load_format="auto" if load_weights else "dummy",
        dtype=str(dtype.resolve(on_gpu=on_gpu)),
        hf_overrides={"head_dtype": "float32"},
        seed=seed,
        tensor_parallel_size=config.tensor_parallel_size,
        # By default, workers would become Ray actors if the engine is in a placement group.
        distributed_executor_backend="mp" if config.tensor_parallel_size > 1 else single_worker,
        max_model_len=config.max_model_len,
        max_num_seqs=1 if deterministic else config.max_num_seqs,
        max_num_batched_tokens=max(MIN_BATCHED_TOKENS, config.max_model_len),
        enforce_eager=config.enforce_eager or not on_gpu,
        enable_prefix_caching=not deterministic,
        enable_return_routed_experts=with_routes,
        worker_extension_cls="mega_agentrl.generator.worker_extension.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND),
        **options | {"disable_log_stats": True} | config.vllm,
    )


def _image_options(max_pixels: int, *, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments for a vision-language model, which gets patches from `image_prompts`.

    Args:
        max_pixels: Pixels of an image that takes a whole prompt. vLLM reserves memory for the
            largest image of the model if that is larger than a step.
        on_gpu: Whether the engine runs on a GPU.
    """
    return {
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_kwargs": {"max_pixels": max_pixels},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        # vLLM runs the tower on as many patches as a step may have, to find out what memory is left
        # for the KV cache. On a CPU that size is a setting.
        "skip_mm_profiling": not on_gpu,
    }
