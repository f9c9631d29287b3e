"""The rollout engines as one object: a Ray actor per vLLM engine (`types.protocols.Generator`).

Requests of a prompt stay on one engine, so that forks find their prefix in its KV cache; a new
prompt goes to the engine with the fewest running requests.

An engine that dies is reported to the `registry`. Its requests, which include their seeds, are sent
to the other engines or, if there are none, wait for the replacement (`EngineSupervisor`). The
replacement gets no requests until it has received the current weights
(`Coordinator.sync_new_engines`).

On the policy's GPUs (`cluster.colocated`), an engine sleeps after its start until the GPUs are
handed to the engines (`gpu_time_sharing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.runtime.gloo_interface import use_interface_of
from mega_agentrl.runtime.remote_calls import (
    ProcessDiedError,
    RemoteCallError,
    gather,
    redirect_output,
    translate_call_errors,
)
from mega_agentrl.runtime.workers.engine_registry import EngineRegistry
from mega_agentrl.runtime.workers.image_store import ImageStore, attach_images

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.config.enums import Dtype
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.runtime import EngineConfig
    from mega_agentrl.runtime.workers.placement import Placement
    from mega_agentrl.types.records import GenerateRequest, Generation


_MAX_ENGINE_LOSSES_PER_REQUEST = 3
"""Number of engines that may die during a request; it then fails, because it may be the cause."""

_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class EngineActor:
    """Ray actor of one vLLM engine; forwards calls to `generator.engine.Engine`."""

    def __init__(
        self,
        config: EngineConfig,
        dtype: Dtype,
        on_gpu: bool,
        log_file: str,
        deterministic: bool,
        gpus: str | None = None,
        return_routes: bool = False,
        exact: bool = False,
        has_all_cores: bool = False,
    ) -> None:
        """Redirect the output; vLLM is imported by `start`.

        Args:
            config: Settings of the engine.
            dtype: Dtype of the weights.
            on_gpu: Whether the engine runs on GPUs.
            log_file: File for the process's output.
            deterministic: Whether results must be reproducible bit by bit.
            gpus: CUDA names of the GPUs shared with the policy, empty on CPUs; None if not shared.
            return_routes: Whether to return the experts of each token of a model that has experts.
            exact: Whether to compute with `numerics`.
            has_all_cores: Whether nothing else computes while the engine does.
        """
        redirect_output(Path(log_file))
        use_interface_of(ray.util.get_node_ip_address())
        self._config = config
        self._dtype = dtype
        self._on_gpu = on_gpu
        self._deterministic = deterministic
        self._gpus = gpus
        self._return_routes = return_routes
        self._exact = exact
        self._has_all_cores = has_all_cores
        self._engine: Any = None

    async def start(self, model_path: str, seed: int, timeout_s: float) -> None:
        """Start the engine without weights, and on shared GPUs put it to sleep.

        `model_path` is the folder of its configuration and tokenizer, `timeout_s` the timeout of
        the start and of one request.
        """
        from mega_agentrl.generator.environment import set_vllm_environment

        deterministic = self._deterministic
        set_vllm_environment(
            self._config,
            on_gpu=self._on_gpu,
            deterministic=deterministic,
            ready_timeout_s=timeout_s,
            gpus=self._gpus,
            exact_model=model_path if self._exact else "",
            has_all_cores=self._has_all_cores,
        )
        from mega_agentrl.generator.engine import Engine

        self._engine = Engine()
        await self._engine.start(
            self._config,
            model_path,
            seed=seed,
            dtype=self._dtype,
            deadline_s=timeout_s,
            deterministic=deterministic,
            colocated=self._gpus is not None,
            return_routes=self._return_routes,
        )
        if self._gpus is not None:
            await self._engine.sleep()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return await getattr(self._engine, method)(*args)

    async def generate_with_images(
        self, request: GenerateRequest, pixel_refs: Mapping[str, Any]
    ) -> Generation:
        """Run a request whose pixels are in the object store, by image id."""
        generation: Generation = await self._engine.generate(
            request, partial(attach_images, refs=pixel_refs)
        )
        return generation


class GeneratorGroup:
    """All engines of a run; `spawn_actor` creates the process of an engine by index."""

    def __init__(
        self,
        actors: Sequence[Any],
        config: TrainConfig,
        spawn_actor: Callable[[int], Any],
    ) -> None:
        self._actors = list(actors)
        self._config = config
        self._spawn_actor = spawn_actor
        self.registry = EngineRegistry(len(self._actors))
        """State of every engine."""
        self._version = 0
        self._num_running: Counter[int] = Counter()
        self._has_answered: set[int] = set()
        self._is_closed = False
        self._has_started = False
        self._engine_of_prompt: dict[str, int] = {}
        self._engine_of_request: dict[str, int] = {}
        self._image_store = ImageStore()

    def actor(self, index: int) -> Any:
        """Return the actor of an engine."""
        return self._actors[index]

    @classmethod
    def launch(
        cls,
        config: TrainConfig,
        *,
        on_gpu: bool,
        log_folder: Path,
        placement: Placement,
        shared_gpus: Callable[[int], str] | None = None,
    ) -> GeneratorGroup:
        """Create the actors, without vLLM, which `submit_start` starts.

        Args:
            config: Configuration of the run.
            on_gpu: Whether the engines run on GPUs.
            log_folder: Folder for one log file per engine.
            placement: Resources of the engines.
            shared_gpus: Returns the CUDA names of the GPUs by engine index if engines share the
                policy's GPUs; None if they have their own.
        """
        engine = config.engine
        num_gpus = engine.tensor_parallel_size if on_gpu and shared_gpus is None else 0
        actor_class = ray.remote(num_cpus=1, num_gpus=num_gpus, max_concurrency=4096)(EngineActor)

        def spawn_actor(index: int) -> Any:
            log_file = str(log_folder / f"engine{index}.log")
            gpus = None if shared_gpus is None else shared_gpus(index)
            return actor_class.options(scheduling_strategy=placement.for_engine(index)).remote(
                engine,
                config.model.dtype,
                on_gpu,
                log_file,
                config.deterministic,
                gpus,
                config.replays_sampled_routes,
                config.model.zero_mismatch,
                config.takes_turns and config.cluster.num_engines == 1,
            )

        actors = [spawn_actor(index) for index in range(config.cluster.num_engines)]
        return cls(actors, config, spawn_actor)

    def submit(self, method: str, *args: Any, engines: Sequence[int]) -> dict[str, Any]:
        """Start a method on these engines; return object refs by engine name."""
        return self.submit_each(method, dict.fromkeys(engines, args))

    def submit_each(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[str, Any]:
        """Start a method on some engines, each with its own arguments; return refs by name."""
        return {
            f"engine {index}": self._actors[index].call.remote(method, *args)
            for index, args in calls.items()
        }

    def submit_start(self) -> dict[str, Any]:
        """Start vLLM in all engines without waiting; return object refs by engine name."""
        return dict(self._submit_engine_start(index) for index in range(len(self._actors)))

    def wait_started(self, calls: dict[str, Any], watch: Callable[[], None] | None = None) -> None:
        """Wait for the calls of `submit_start` or `respawn_engine`, calling `watch` meanwhile."""
        gather(calls, "start of the engines", self._config.cluster.call_timeout_s, watch)
        self._has_started = True

    def sleep(self) -> None:
        """Put all engines to sleep; an engine that fails is lost."""
        actors = {index: self._actors[index] for index in self.registry.live_engines}
        calls = self.submit("sleep", engines=list(actors))
        for (index, actor), (name, call) in zip(actors.items(), calls.items(), strict=True):
            try:
                gather({name: call}, "sleep", self._config.cluster.call_timeout_s)
            except RemoteCallError as error:
                self.report_lost(index, actor, str(error))

    def wake_up(self, part: str, engines: Sequence[int]) -> None:
        """Allocate `weights` or `cache` in these engines.

        Raises:
            RemoteCallError: An engine failed.
        """
        calls = self.submit("wake_up", part, engines=engines)
        gather(calls, f"wake-up of the {part}", self._config.cluster.call_timeout_s)

    def report_lost(self, index: int, actor: Any, reason: str) -> None:
        """Report that an engine's process is dead or unusable; ignored if it has been replaced."""
        with self.registry.condition:
            if self._actors[index] is not actor or not self.registry.mark_lost(index, reason):
                return
        _logger.warning("engine %d is lost and replaced: %s", index, reason)
        self._forget_prompts(index)
        if self._config.cluster.colocated:
            # Its memory must be free before the replacement starts.
            ray.kill(actor, no_restart=True)

    def stuck_limit_s(self, index: int) -> float:
        """Return the silence in seconds after which an engine is lost."""
        return self._config.engine.stuck_limit_s(has_answered=index in self._has_answered)

    def respawn_engine(self, index: int) -> dict[str, Any]:
        """Start a new process for an engine, dead or alive; return its start for `wait_started`.

        The engine gets no requests until `enable_routing`.

        Raises:
            RemoteCallError: The engines are closed.
        """
        if self._is_closed:
            raise RemoteCallError(f"engine {index} is not restarted: the engines are closed")
        self.registry.disable_routing(index)
        self._forget_prompts(index)
        ray.kill(self._actors[index], no_restart=True)
        self._has_answered.discard(index)
        self._actors[index] = self._spawn_actor(index)
        return dict([self._submit_engine_start(index)])

    def enable_routing(self, index: int) -> None:
        """Let an engine get requests."""
        self.registry.enable_routing([index])

    @property
    def routable_engines(self) -> list[int]:
        """Indices of the engines that get requests."""
        return sorted(self.registry.routable)

    def _forget_prompts(self, index: int) -> None:
        """Let the next requests of an engine's prompts choose another engine."""
        self._engine_of_prompt = {
            key: engine for key, engine in list(self._engine_of_prompt.items()) if engine != index
        }

    def _submit_engine_start(self, index: int) -> tuple[str, Any]:
        path, seed = self._config.model.path, self._config.seed + index
        timeout_s = self._config.cluster.call_timeout_s
        return f"engine {index}", self._actors[index].start.remote(path, seed, timeout_s)

    @property
    def version(self) -> int:
        """Weight version that all engines have confirmed."""
        return self._version

    def serve_version(self, version: int, engines: Sequence[int]) -> None:
        """Serve a weight version, which all live engines have; `engines` are their indices."""
        self._version = version
        self._engine_of_prompt.clear()  # their KV caches are gone
        self.registry.enable_routing(engines)
        self.registry.notify_waiters()

    @property
    def can_serve(self) -> bool:
        """Whether any engine gets requests."""
        return bool(self.registry.routable)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate on the prompt's engine; retry on another engine if that one dies."""
        num_lost = 0
        while True:
            await self.registry.wait_for_engine()
            index = self._route(request.request_id)
            if index is None:
                continue
            actor = self._actors[index]
            self._num_running[index] += 1
            self._engine_of_request[request.request_id] = index
            try:
                result: Generation = await self._generate_on(index, request)
            except ProcessDiedError as error:
                num_lost += 1
                self.report_lost(index, actor, str(error))
                if num_lost == _MAX_ENGINE_LOSSES_PER_REQUEST:
                    raise
            else:
                self._has_answered.add(index)
                return result
            finally:
                self._num_running[index] -= 1
                del self._engine_of_request[request.request_id]

    async def abort(self, request_id: str) -> None:
        """Abort a running request; does nothing if it has ended."""
        if (index := self._engine_of_request.get(request_id)) is not None:
            await self._call_engine(index, "abort", request_id)

    async def pause(self) -> None:
        """Pause all routable engines."""
        await asyncio.gather(*(self._call_engine(i, "pause") for i in self.routable_engines))

    async def resume(self) -> None:
        """Resume all routable engines."""
        await asyncio.gather(*(self._call_engine(i, "resume") for i in self.routable_engines))

    def close(self) -> None:
        """Kill every engine and its workers, and fail all requests; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.registry.close()
        for index in self.routable_engines:
            self.registry.disable_routing(index)
        if self._has_started:  # an engine that is starting would answer only after its start
            calls = [actor.call.remote("close") for actor in self._actors]
            ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _route(self, request_id: str) -> int | None:
        """Return the engine for a request; None if another thread has just lost the last one."""
        prompt_key = request_id.split("/", 1)[0]
        # Other threads may remove entries (`serve_version`, `report_lost`).
        engine = self._engine_of_prompt.get(prompt_key)
        if engine not in self.registry.routable:
            engine = min(
                self.routable_engines,
                key=lambda index: (self._num_running[index], index),
                default=None,
            )
            if engine is not None:
                self._engine_of_prompt[prompt_key] = engine
        return engine

    async def _generate_on(self, index: int, request: GenerateRequest) -> Any:
        if not request.images:
            return await self._call_engine(index, "generate", request)
        detached, pixel_refs = self._image_store.detach(request)
        call = self._actors[index].generate_with_images.remote(detached, pixel_refs)
        return await self._await_engine(index, "generate", call)

    async def _call_engine(self, index: int, method: str, *args: Any) -> Any:
        return await self._await_engine(
            index, method, self._actors[index].call.remote(method, *args)
        )

    async def _await_engine(self, index: int, method: str, call: Any) -> Any:
        name = f"engine {index}"
        timeout_s = self._config.cluster.call_timeout_s
        try:
            with translate_call_errors(method, name):
                return await asyncio.wait_for(call, timeout_s)
        except TimeoutError as error:
            message = f"{method}: no answer within {timeout_s:g} s from {name}"
            raise RemoteCallError(message, method, (name,)) from error
