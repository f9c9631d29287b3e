"""Join or start the Ray cluster of a run and check that the parallel layout fits it.

Ray and torch are imported inside the functions, so that the check against this machine runs before
any slow import.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.runtime.ray_compat import (
    START_S,
    keep_sigterm_handler,
    listen_on_loopback_only,
    patient_ray_start,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mega_agentrl.config.schema import TrainConfig

MAX_RANKS_PER_CORE = 4
"""Maximum number of ranks per CPU core of this machine."""

NVIDIA_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver, on Linux and on WSL."""

_CLOSE_S, _JOINED_CLOSE_S = 60.0, 5.0
"""Maximum time in seconds that the end of a run waits for its own cluster, which may still be
starting, or for a joined cluster, whose head may not answer."""

_CPU_STORE_BYTES = 512 * 1024**2
"""Size of Ray's object store on a machine without GPUs, whose batches are small."""

_logger = logging.getLogger(__name__)


def check_local_size(config: TrainConfig) -> None:
    """Raise `ValueError` if the layout needs more than this machine has."""
    check_cluster_size(config, num_cores=os.cpu_count() or 1, num_gpus=num_local_gpus())


def num_local_gpus() -> int:
    """Return the number of this machine's GPUs that torch can use."""
    if not any(Path(name).exists() for name in NVIDIA_DEVICE_FILES):
        return 0
    import torch

    # Counts with NVML, without creating a CUDA context; respects CUDA_VISIBLE_DEVICES.
    return torch.cuda.device_count()


def check_cluster_size(config: TrainConfig, *, num_cores: int, num_gpus: int) -> None:
    """Raise `ValueError` if the layout needs more cores or GPUs than there are.

    On GPUs, every rank of policy, engines, critic and reward model needs its own GPU, except that
    with `cluster.colocated` the engines use the policy's, and with `cluster.colocated_models` the
    other models do. On CPUs the models take turns, and up to
    `MAX_RANKS_PER_CORE` ranks may share a core, which is reported on the terminal and in the log. A
    joined cluster must have one core per actor, because Ray would wait for a missing core forever.
    """
    layout = config.parallel
    policy_ranks = layout.world_size
    engine_ranks = config.cluster.num_engines * config.engine.tensor_parallel_size
    auxiliary_ranks = policy_ranks * len(config.auxiliary_models)
    own_auxiliary_ranks = 0 if config.cluster.colocated_models else auxiliary_ranks
    layout_text = (
        f"parallel.tensor={layout.tensor} x parallel.pipeline={layout.pipeline} x "
        f"parallel.data={layout.data} = {policy_ranks} policy ranks, cluster.num_engines="
        f"{config.cluster.num_engines} x engine.tensor_parallel_size="
        f"{config.engine.tensor_parallel_size} = {engine_ranks} engine ranks"
    )
    for model in config.auxiliary_models:
        layout_text += f", and {policy_ranks} ranks of the {model}, which has the policy's layout"
    if num_gpus:
        own_engine_ranks = 0 if config.cluster.colocated else engine_ranks
        num_needed = policy_ranks + own_engine_ranks + own_auxiliary_ranks
        if num_needed > num_gpus:
            raise InputError(
                "GPUs of the cluster",
                num_gpus,
                f"at least {num_needed} for {layout_text}; lower one of these (parallel=single "
                "makes one policy rank) or join a larger cluster (cluster.ray_address)",
            )
        return
    num_actors = policy_ranks + config.cluster.num_engines + own_auxiliary_ranks
    if config.cluster.ray_address and num_actors > num_cores:
        raise InputError(
            "cores of the cluster",
            num_cores,
            f"one for each of {num_actors} actors (an engine is one) of {layout_text}; lower one "
            "of these or join a larger cluster (cluster.ray_address)",
        )
    max_ranks = max(policy_ranks, engine_ranks)
    if max_ranks > MAX_RANKS_PER_CORE * num_cores:
        raise InputError(
            "cores of this machine",
            num_cores,
            f"enough for {layout_text}: a run on CPUs is only a trial",
            f"more ranks than {MAX_RANKS_PER_CORE} to each of the {num_cores} cores here: a layout "
            "that was made for a cluster (cluster.ray_address)",
        )
    if max_ranks > num_cores:
        num_processes = policy_ranks + engine_ranks + auxiliary_ranks
        message = (
            f"{layout_text}: {num_processes} processes share {num_cores} cores; importing their "
            f"libraries and every step take about {num_processes / num_cores:.1f} times as long as "
            "with a core for each"
        )
        _logger.warning("%s", message)
        print(f"mega_agentrl: {message}", file=sys.stderr)


def check_torch_build(num_gpus: int, cuda: str | None) -> None:
    """Raise `ValueError` if the cluster has GPUs but torch is a CPU build.

    Args:
        num_gpus: Number of GPUs in the cluster.
        cuda: `torch.version.cuda`; None for a CPU build.
    """
    if num_gpus and cuda is None:
        import torch

        raise InputError(
            "torch",
            f"{torch.__version__}, a build for CPUs",
            f"one with CUDA (make env DEVICE=gpu) for the {num_gpus} GPUs of cluster.ray_address, "
            "or a cluster without GPUs (ray start --num-gpus=0)",
            "an environment made on a login node",
        )


def set_ray_environment() -> None:
    """Set the variables that Ray's processes on this machine read when they start.

    Ray would start ranks and engines with niceness 15, so that the code that tools run, which has
    niceness 0, and every other program on the machine would take most of a core from them.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's own limits of 30 and 60 s are too short where other programs use all cores.
    os.environ.setdefault("RAY_agent_register_timeout_ms", f"{1000 * START_S:.0f}")
    os.environ.setdefault("RAY_worker_register_timeout_seconds", f"{START_S:.0f}")
    os.environ["RAY_DEDUP_LOGS"] = "0"


class ClusterConnection:
    """The Ray cluster of a run, which a thread joins or starts while the inputs are read.

    A context manager: at its end the run leaves the cluster, or a local one is shut down. Signals
    interrupt the main thread only, so they never leave a half-started cluster behind. The thread
    lives as long as the connection, because Linux ends Ray's processes with the thread that started
    them.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._is_settled, self._is_closed = threading.Event(), threading.Event()
        self._has_gpus = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ray-cluster", daemon=True)
        if not config.cluster.ray_address and "ray" not in sys.modules:
            # Ray reads these once, when it is imported.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed.set()
        if self._thread.ident is not None:
            # Where the wait is too short, the end of this process ends what Ray has started.
            self._thread.join(_JOINED_CLOSE_S if self._config.cluster.ray_address else _CLOSE_S)

    def begin(self) -> None:
        """Begin to connect and return at once; safe to call twice."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> bool:
        """Wait until the run is connected; return whether the cluster has GPUs.

        Raises:
            ValueError: The layout does not fit the joined cluster, or this environment cannot use
                its GPUs.
            RuntimeError: Ray could not start.
            Exception: Ray could not be joined.
        """
        self.begin()
        self._is_settled.wait()
        if self._error is not None:
            raise self._error
        return self._has_gpus

    def _run(self) -> None:
        import ray

        try:
            self._has_gpus = _connect(self._config)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._error = error
            # Ray's own error for servers that do not come up in time is a plain exception.
            if type(error) in (Exception, ChildProcessError):
                self._error = RuntimeError(
                    f"Ray did not start: {' '.join(str(error).split())} Probable cause: the "
                    "machine is overloaded by other processes; start the same command again"
                )
                self._error.__cause__ = error
        finally:
            self._is_settled.set()
        self._is_closed.wait()
        ray.shutdown()


def _connect(config: TrainConfig) -> bool:
    """Join or start the Ray cluster and return whether it has GPUs.

    A local cluster gets the GPUs that torch can use here; `check_local_size` has already checked
    that the layout fits them. Whoever reaches a cluster may run code as its user, so a local one
    listens on the loopback address only and asks other users of this machine for a token.

    Raises:
        ValueError: The layout does not fit the joined cluster, or this environment cannot use its
            GPUs.
    """
    import ray
    import torch

    set_ray_environment()
    num_cores = os.cpu_count() or 1
    with keep_sigterm_handler(), patient_ray_start():
        if config.cluster.ray_address:
            ray.init(
                address=config.cluster.ray_address, log_to_driver=False, logging_level=logging.ERROR
            )
        else:
            listen_on_loopback_only()
            ranks = config.parallel.world_size + config.cluster.num_engines
            ranks += config.parallel.world_size * len(config.auxiliary_models)
            num_gpus = num_local_gpus()
            ray.init(
                address="local",  # never a cluster that someone else has started on this machine
                num_cpus=max(num_cores, ranks),
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # None is Ray's default, a share of the memory, so that large batches do not spill.
                object_store_memory=None if num_gpus else _CPU_STORE_BYTES,
            )
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    if config.cluster.ray_address:
        check_torch_build(num_gpus, torch.version.cuda)
        check_cluster_size(config, num_cores=int(resources.get("CPU", 0)), num_gpus=num_gpus)
    return num_gpus > 0
