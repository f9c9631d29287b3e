"""The rollout engines as one object: a Ray actor per vLLM engine behind the `Generator` port.

Requests of one prompt stay on one engine, so that forks find their prefix in its cache; a
new prompt goes to the engine with the fewest running requests.

An engine that is new or replaced gets no requests until it is admitted, which comes after it
has the current weights (`WeightBridge.welcome`); the others go on meanwhile.

With a keeper (`engine_keeper`) an engine that dies or hangs is replaced, and what it was at is
asked of the others, or of its successor where there are none: a request holds all that it needs,
its seed too. Nobody but the keeper knows of it.

On the policy's GPUs (`cluster.colocated`) an engine starts where `lodging` says and sleeps from
then on, until its turn comes (`turns`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.runtime.remote import DiedError, RemoteError, gather, redirect_output
from mega_agentrl.types.faults import EngineLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.config.schema import EngineConfig, TrainConfig
    from mega_agentrl.runtime.engine_keeper import EngineKeeper
    from mega_agentrl.types.records import GenerateRequest, Generation


_MAX_LOSSES = 3
"""Engines that a request may be at when they die; then it is taken for the cause."""


class EngineActor:
    """One vLLM engine in a process of its own; forwards calls to `generator.engine.Engine`.

    gpus: those that it shares, as CUDA names them, empty on a CPU; None where it shares none.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_gpu: bool,
        log_file: str,
        deterministic: bool,
        gpus: str | None = None,
    ) -> None:
        redirect_output(Path(log_file))
        self._config = config
        self._on_gpu = on_gpu
        self._deterministic = deterministic
        self._gpus = gpus
        self._engine: Any = None

    async def start(self, model_path: str, seed: int, deadline_s: float) -> None:
        """Start the engine with the weights of a model folder; deadline_s: of one request.

        On GPUs that it shares it sleeps then.
        """
        from mega_agentrl.generator.environment import set_environment

        deterministic = self._deterministic
        set_environment(
            self._config, on_gpu=self._on_gpu, deterministic=deterministic, gpus=self._gpus
        )
        from mega_agentrl.generator.engine import Engine

        self._engine = Engine()
        await self._engine.start(
            self._config,
            model_path,
            seed=seed,
            deadline_s=deadline_s,
            deterministic=deterministic,
            colocated=self._gpus is not None,
        )
        if self._gpus is not None:
            await self._engine.sleep()

    async def call(self, method: str, *args: Any) -> Any:
        """Run a method of the engine."""
        return await getattr(self._engine, method)(*args)


class GeneratorGroup:
    """All engines; implements `types.ports.Generator`."""

    def __init__(
        self,
        actors: Sequence[Any],
        config: TrainConfig,
        spawn: Callable[[int], Any] | None = None,
    ) -> None:
        """actors: one an engine. spawn: makes the process of one more engine, by its number."""
        self._actors = list(actors)
        self._config = config
        self._spawn = spawn
        self._admitted = set(range(len(self._actors)))
        self._version = 0
        self._running: Counter[int] = Counter()
        self._engine_of_prompt: dict[str, int] = {}
        self._engine_of_request: dict[str, int] = {}
        self._keeper: EngineKeeper | None = None

    def keep(self, keeper: EngineKeeper) -> None:
        """From now on the keeper replaces what is lost."""
        self._keeper = keeper

    def actor(self, index: int) -> Any:
        """The process of an engine."""
        return self._actors[index]

    @classmethod
    def launch(
        cls,
        config: TrainConfig,
        *,
        on_gpu: bool,
        log_folder: Path,
        lodging: Callable[[int], tuple[Any, str]] | None = None,
    ) -> GeneratorGroup:
        """Start the processes; `begin_start` then starts vLLM in them.

        lodging: scheduling strategy and GPUs by the number of an engine, where those are another
        group's; None: each has its own.
        """
        engine = config.engine
        num_gpus = engine.tensor if on_gpu and lodging is None else 0
        actor_class = ray.remote(num_cpus=1, num_gpus=num_gpus, max_concurrency=4096)(EngineActor)

        def spawn(index: int) -> Any:
            log_file = str(log_folder / f"engine{index}.log")
            given = (engine, on_gpu, log_file, config.deterministic)
            if lodging is None:
                return actor_class.remote(*given)
            strategy, gpus = lodging(index)
            return actor_class.options(scheduling_strategy=strategy).remote(*given, gpus)

        actors = [spawn(index) for index in range(config.cluster.num_engines)]
        return cls(actors, config, spawn)

    def start_call(self, method: str, *args: Any, only: Sequence[int]) -> dict[str, Any]:
        """Start a method on some engines; object refs by engine name."""
        return {f"engine {index}": self._actors[index].call.remote(method, *args) for index in only}

    def start_each(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[str, Any]:
        """Start a method on some engines, each with arguments of its own."""
        return {
            f"engine {index}": self._actors[index].call.remote(method, *args)
            for index, args in calls.items()
        }

    def begin_start(self) -> dict[str, Any]:
        """Start all engines; object refs by engine name, so that others can start meanwhile."""
        return dict(self._begin_start(index) for index in range(len(self._actors)))

    def finish_start(self, calls: dict[str, Any]) -> None:
        """Wait until every engine serves."""
        gather(calls, "start of the engines", self._config.cluster.call_deadline_s)

    def sleep(self) -> None:
        """See `turns.Sleepers.sleep`; one that cannot is the keeper's to replace.

        Raises `RemoteError` for it where there is no keeper.
        """
        fresh = set() if self._keeper is None else self._keeper.fresh
        actors = {index: self._actors[index] for index in sorted(fresh | self._admitted)}
        calls = self.start_call("sleep", only=list(actors))
        for (index, actor), (name, call) in zip(actors.items(), calls.items(), strict=True):
            try:
                gather({name: call}, "sleep", self._config.cluster.call_deadline_s)
            except RemoteError as error:
                if self._keeper is None:
                    raise
                self._keeper.lost(index, actor, str(error))

    def wake(self, part: str, only: Sequence[int]) -> None:
        """See `turns.Sleepers.wake`; raises `RemoteError` naming who does not."""
        calls = self.start_call("wake", part, only=only)
        gather(calls, f"room for the {part}", self._config.cluster.call_deadline_s)

    def begin_replace(self, index: int | None = None) -> tuple[int, dict[str, Any]]:
        """Start a new process for an engine, dead or not, or one more engine.

        Returns its number and what `finish_start` waits for. It gets no requests until `admit`.
        """
        assert self._spawn is not None, "a group that was not launched cannot grow"
        if index is None:
            index = len(self._actors)
            self._actors.append(None)
        else:
            self.dismiss(index)
            ray.kill(self._actors[index], no_restart=True)
        self._actors[index] = self._spawn(index)
        return index, dict([self._begin_start(index)])

    def admit(self, index: int) -> None:
        """Let an engine get requests."""
        self._admitted.add(index)

    @property
    def admitted(self) -> list[int]:
        """Numbers of the engines that get requests."""
        return sorted(self._admitted)

    def dismiss(self, index: int) -> None:
        """Let an engine get no more requests."""
        self._admitted.discard(index)
        homes = self._engine_of_prompt
        self._engine_of_prompt = {key: home for key, home in homes.items() if home != index}

    def _begin_start(self, index: int) -> tuple[str, Any]:
        path, seed = self._config.model.path, self._config.seed + index
        deadline_s = self._config.cluster.call_deadline_s
        return f"engine {index}", self._actors[index].start.remote(path, seed, deadline_s)

    @property
    def version(self) -> int:
        """See `Generator.version`."""
        return self._version

    def set_version(self, version: int) -> None:
        """Note the weight version all engines have confirmed."""
        self._version = version
        self._engine_of_prompt.clear()  # the caches they were chosen for are gone

    @property
    def can_serve(self) -> bool:
        """See `Generator.can_serve`."""
        return bool(self._admitted)

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Generator.generate`."""
        num_lost = 0
        while True:
            if self._keeper is not None:
                await self._keeper.wait_for_any()
            index = self._route(request.request_id)
            actor = self._actors[index]
            self._running[index] += 1
            self._engine_of_request[request.request_id] = index
            try:
                result: Generation = await self._ask(index, "generate", request)
            except DiedError as error:
                num_lost += 1
                if self._keeper is None:
                    raise
                self._keeper.lost(index, actor, str(error))
                if num_lost == _MAX_LOSSES:
                    raise
            else:
                return result
            finally:
                self._running[index] -= 1
                del self._engine_of_request[request.request_id]

    async def abort(self, request_id: str) -> None:
        """See `Generator.abort`."""
        if (index := self._engine_of_request.get(request_id)) is not None:
            await self._ask(index, "abort", request_id)

    async def entropies(self, request_id: str) -> tuple[float, ...]:
        """See `Generator.entropies`."""
        index = self._engine_of_request.get(request_id)
        if index is None:
            raise ValueError(f"request_id={request_id}: expected a running request")
        result: tuple[float, ...] = await self._ask(index, "entropies", request_id)
        return result

    async def pause(self) -> None:
        """See `Generator.pause`."""
        await asyncio.gather(*(self._ask(i, "pause") for i in self.admitted))

    async def resume(self) -> None:
        """See `Generator.resume`."""
        await asyncio.gather(*(self._ask(i, "resume") for i in self.admitted))

    def close(self) -> None:
        """End every engine and its workers; safe to call twice."""
        for actor in self._actors:
            try:
                ray.get(actor.call.remote("close"), timeout=5)
            except (ray.exceptions.RayError, AttributeError):
                pass  # it never started, or is stuck: killed below
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _route(self, request_id: str) -> int:
        prompt_key = request_id.split("/", 1)[0]
        # `set_version` and `dismiss` may empty it meanwhile, in other threads.
        home = self._engine_of_prompt.get(prompt_key)
        if home is None:
            home = min(self.admitted, key=lambda index: (self._running[index], index))
            self._engine_of_prompt[prompt_key] = home
        return home

    async def _ask(self, index: int, method: str, *args: Any) -> Any:
        name = f"engine {index}"
        deadline_s = self._config.cluster.call_deadline_s
        try:
            return await asyncio.wait_for(
                self._actors[index].call.remote(method, *args), deadline_s
            )
        except TimeoutError as error:
            raise RemoteError(f"{method}: no answer within {deadline_s:g} s from {name}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineLostError):
                raise DiedError(f"{method}: {name}: {error.cause}", name) from error
            raise RemoteError(f"{method} failed on {name}: {error.cause!r}") from error
        except ray.exceptions.RayActorError as error:
            message = f"{method}: {name} died; see logs/engine{index}.log"
            raise DiedError(message, name) from error
