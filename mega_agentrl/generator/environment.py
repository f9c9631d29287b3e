"""The environment variables of vLLM, set in one place before it is imported.

vLLM reads its settings from the environment of the hosting process and of the processes it
starts (the engine core and one worker per tensor-parallel rank), which inherit it. Owns
these variables and nothing else; everything that is an engine argument is in `engine`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_agentrl.config.schema import EngineConfig

HOST_PID_VARIABLE = "MEGA_AGENTRL_ENGINE_HOST_PID"
"""Process that owns the engine; every process of the engine ends with it (see `plugin`)."""

CPU_KERNELS = 128
"""Compiled kernels that a worker keeps, one for each number of rows of a batch and each shape of
a weight. By default oneDNN keeps 1,024: hundreds of MiB, and not faster."""


def set_environment(
    config: EngineConfig,
    *,
    on_gpu: bool = False,
    deterministic: bool = False,
    gpus: str | None = None,
    log_path: Path | None = None,
) -> None:
    """Set vLLM's variables in this process; must run before the first `import vllm`.

    deterministic: sums are always in the same order. gpus: those that are shared with others, as
    CUDA names them; without any the process keeps what it was given. log_path: file that gets
    vLLM's log lines, also those of its child processes; None leaves them on stderr.
    """
    variables = {
        HOST_PID_VARIABLE: str(os.getpid()),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if config.eager:
        # The sampler holds one small torch.compile kernel, whose compilation costs the
        # first request several seconds and gains nothing without graphs.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    if on_gpu:
        # The runner that `tap_v2` is made for; vLLM would fall back to the other one.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    else:
        variables |= _cpu_variables(config)
    if deterministic:
        variables |= {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if log_path is not None:
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(_write_logging_config(log_path))
    os.environ.update(variables)


def _cpu_variables(config: EngineConfig) -> dict[str, str]:
    """Variables of the CPU build.

    One worker shares the cores with the engine core and the host, so it gets half of them.
    With several workers each is bound to its own share, which vLLM demands on one NUMA node.
    """
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CPU_KERNELS),
    }
    cpus = sorted(os.sched_getaffinity(0))
    if config.tensor == 1:
        threads = max(1, len(cpus) // 2)
        return variables | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
        }
    share = max(1, len(cpus) // config.tensor)
    groups = [
        ",".join(str(cpus[(rank * share + i) % len(cpus)]) for i in range(share))
        for rank in range(config.tensor)
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
