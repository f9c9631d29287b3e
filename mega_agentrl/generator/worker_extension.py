"""Methods that the engine calls on its workers through `collective_rpc`.

vLLM mixes this class into its worker class. Answers are plain values; other objects are sent as
pickled bytes. The methods do not raise, because vLLM would then take the other workers' answers for
answers to the next call.
"""

from __future__ import annotations

import gc
import os
import pickle
from typing import Any, Self

import torch
from vllm.platforms import current_platform

from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import PROCESS_MEMORY
from mega_agentrl.generator.entropy_tap import tap_sampler
from mega_agentrl.generator.environment import EXACT_MODEL_VARIABLE
from mega_agentrl.generator.layer_probe import LayerProbe
from mega_agentrl.generator.route_capture import install_route_capture
from mega_agentrl.reshard.device_location import current_device_location
from mega_agentrl.reshard.layout import PackedLayout

CPU_NICENESS = 10
"""Niceness of a worker on a CPU."""


class WorkerExtension:
    """Mixin of the vLLM worker; method names carry a prefix to avoid collisions."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a worker whose sampler is tapped as soon as the model is loaded.

        So vLLM profiles its memory and warms its kernels up with the tap. On a CPU this also starts
        measuring the worker's memory: at this point, for which vLLM has no hook, libraries are
        loaded but the model is not.
        """
        if current_platform.is_cpu():
            PROCESS_MEMORY.start()
        worker: Any = super().__new__(cls)
        load_model = worker.load_model

        def load_model_and_tap(*args: Any, **kwargs: Any) -> None:
            load_model(*args, **kwargs)
            exact = bool(os.environ.get(EXACT_MODEL_VARIABLE))
            worker.model_runner.sampler = tap_sampler(worker.model_runner.sampler, exact=exact)

        worker.load_model = load_model_and_tap
        return worker

    def routes_install(self) -> None:
        """Make the model runner return the experts of each token; called once after the start."""
        install_route_capture(self.model_runner)

    def layer_probe_start(self, num_tokens: int) -> None:
        """Record the layers' values in the next pass over this number of tokens."""
        self._layer_probe = LayerProbe(self.model_runner.get_model(), num_tokens)

    def layer_probe_finish(self) -> bytes:
        """Return the pickled values by point, and stop recording."""
        self._layer_probe.close()
        return pickle.dumps(self._layer_probe.values)

    def peak_memory_mib(self) -> dict[str, float]:
        """Return this worker's peak memory in MiB.

        On a CPU the memory of its libraries is reported separately.
        """
        if self.device.type == "cuda":
            return {"peak_mib": torch.cuda.max_memory_reserved() / MIB}
        return {
            "peak_mib": PROCESS_MEMORY.peak_mib(),
            "libraries_mib": PROCESS_MEMORY.libraries_mib(),
        }

    def weights_layout(self) -> tuple[str | None, bytes]:
        """Return an error, or the pickled layout and device location of this worker."""
        try:
            layout = PackedLayout.pack(self.weight_transfer_engine.layout())
            answer = (layout, current_device_location())
        except Exception as error:  # noqa: BLE001 - the edge of the worker process
            return f"{type(error).__name__}: {error}", b""
        return None, pickle.dumps(answer)

    def weights_install_guard(self) -> None:
        """Make the model refuse steps with unverified weights; called once after the start."""
        runner = self.model_runner
        runner.execute_model = self.weight_transfer_engine.guard_execute_model(runner.execute_model)

    def weights_failure(self) -> tuple[bool, str] | None:
        """Return whether a peer made the update fail, and the reason; None without a failure."""
        failure = self.weight_transfer_engine.failure
        return failure and (failure.is_caused_by_peer, failure.reason)

    def weights_verify(self, version: int, expected: bytes) -> None:
        """Verify the received weights; `expected` has the pickled digests of every tensor rank."""
        digests = pickle.loads(expected)[self.rank % self.parallel_config.tensor_parallel_size]
        self.weight_transfer_engine.verify(version, digests)

    def weights_reject(self, reason: str) -> None:
        """Give up the current weight update."""
        self.weight_transfer_engine.reject(reason)
        self._weight_update_active = False

    def weights_release(self) -> None:
        """Refuse steps until an update succeeds, because the weights are undefined from now on."""
        self.weight_transfer_engine.release_weights()

    def finish_startup(self) -> None:
        """Trace the layout, and exempt startup objects from garbage collection.

        Called once after the start, so that a link to a new engine does not wait for the trace. An
        error of the trace is reported when the layout is asked for.

        vLLM itself exempts objects on GPUs only. On a CPU this also lowers the priority of the
        process: for a second after its last step a worker polls for work, on cores that the trainer
        needs.
        """
        self.weights_layout()
        gc.collect()
        gc.freeze()
        if self.device.type == "cpu":
            os.nice(CPU_NICENESS)
