"""Environment variables of vLLM, set in one place before it is imported.

vLLM's processes (the engine core and one worker per tensor-parallel rank) inherit the environment
of the hosting process. Settings that are engine arguments are in `engine_args`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_agentrl.config.sections.runtime import EngineConfig

HOST_PID_VARIABLE = "MEGA_AGENTRL_ENGINE_HOST_PID"
"""Variable with the id of the process that hosts the engine, with which vLLM's processes end."""

EXACT_MODEL_VARIABLE = "MEGA_AGENTRL_EXACT_MODEL"
"""Variable with the folder of the model whose layers compute with `numerics`."""

ONEDNN_CACHE_CAPACITY = 128
"""Number of compiled kernels that a worker keeps, one per batch size and weight shape.

oneDNN's default of 1,024 takes hundreds of MiB and is not faster.
"""


def set_vllm_environment(
    config: EngineConfig,
    *,
    on_gpu: bool = False,
    deterministic: bool = False,
    ready_timeout_s: float = 600.0,
    gpus: str | None = None,
    log_path: Path | None = None,
    exact_model: str = "",
    has_all_cores: bool = False,
) -> None:
    """Set vLLM's variables in this process; must run before the first `import vllm`.

    Args:
        config: Engine settings.
        on_gpu: Whether the engine runs on a GPU.
        deterministic: Always compute sums in the same order.
        ready_timeout_s: Time that vLLM's processes have to start, `cluster.call_timeout_s`.
        gpus: Value of CUDA_VISIBLE_DEVICES for an engine on GPUs of the trainer; None leaves the
            variable unchanged.
        log_path: File for vLLM's log lines, including those of its child processes; None for
            stderr.
        exact_model: Model folder if vLLM's layers shall compute with `numerics`, else empty.
        has_all_cores: Whether nothing else computes on this machine's CPUs while the engine does.
    """
    variables = {
        HOST_PID_VARIABLE: str(os.getpid()),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(ready_timeout_s)),
        # The longest step of several workers, the first of which compiles kernels.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(
            math.ceil(config.stuck_limit_s(has_answered=False))
        ),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if config.enforce_eager or not on_gpu:
        # The sampler has one small torch.compile kernel, whose compilation costs the first
        # request several seconds and gains nothing without graphs.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    if on_gpu:
        # `TappedSamplerV2` needs the V2 runner; vLLM would choose the V1 runner for some models.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    else:
        variables |= _cpu_variables(config, has_all_cores=has_all_cores)
    if deterministic:
        variables |= {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if exact_model:
        variables[EXACT_MODEL_VARIABLE] = exact_model
    if log_path is not None:
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(_write_logging_config(log_path))
    os.environ.update(variables)


def _cpu_variables(config: EngineConfig, *, has_all_cores: bool) -> dict[str, str]:
    """Return the variables of the CPU build.

    One worker gets half of the cores, or all if no one else computes meanwhile. Several workers are
    each bound to their own share, which vLLM requires on one NUMA node.
    """
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_kv_cache_gib),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(ONEDNN_CACHE_CAPACITY),
    }
    cpus = sorted(os.sched_getaffinity(0))
    if config.tensor_parallel_size == 1:
        threads = len(cpus) if has_all_cores else max(1, len(cpus) // 2)
        return variables | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
        }
    share = max(1, len(cpus) // config.tensor_parallel_size)
    groups = [
        ",".join(str(cpus[(rank * share + i) % len(cpus)]) for i in range(share))
        for rank in range(config.tensor_parallel_size)
    ]
    return variables | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(groups)}


def _write_logging_config(log_path: Path) -> Path:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"}
        },
        "handlers": {
            "file": {
                "class": "logging.FileHandler",
                "filename": str(log_path),
                "formatter": "line",
            }
        },
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    path = log_path.with_suffix(".logging.json")
    path.write_text(json.dumps(settings, indent=2))
    return path
