"""One vLLM engine: generation with exact entropies, and weights that arrive over the bridge.

Lives in a process of its own, whose environment `environment.set_environment` has prepared;
everything in and out is picklable. vLLM adds an engine-core process and one worker per
tensor-parallel rank, which end with the host (see `plugin`).

Serving states: it serves -> `pause` -> paused -> `resume` -> it serves. A weight update is

    pause -> receive_weights -> confirm_weights -> probe (if wanted) -> resume

Requests that arrive meanwhile wait; once a step of it fails, or `refuse` is called, they are
refused with the reason until a later update has gone through. `pause` waits for every request
that was let in, so each is computed by one version, the one it is labelled with.
On shared GPUs it may `sleep` in any state, and is woken for an update: "weights" before
`receive_weights`, "cache" after `confirm_weights`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
from collections.abc import Awaitable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mega_agentrl.generator.engine_args import engine_args
from mega_agentrl.generator.liveness import Progress, start_failure
from mega_agentrl.generator.sampling import (
    StopTable,
    check_request,
    probe_params,
    sampling_params,
    to_generation,
)
from mega_agentrl.generator.sleep import HeldMemory
from mega_agentrl.generator.tap_reader import TapReader
from mega_agentrl.types.faults import EngineLostError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import numpy as np

    from mega_agentrl.config.schema import EngineConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.transport import WeightLink
    from mega_agentrl.reshard.whereabouts import Whereabouts
    from mega_agentrl.types.records import GenerateRequest, Generation


DEATH_CHECK_S = 0.5
CLOSE_GRACE_S = 2.0
"""Time vLLM's processes get to end by themselves before they are killed."""


class Engine:
    """Implements `types.ports.Generator` for one vLLM engine."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self._version = 0
        self._failure: str | None = None
        self._updating = False
        self._serving, self._idle = asyncio.Event(), asyncio.Event()
        self._num_running = self._num_errands = 0
        self._progress = Progress()
        self._keys = itertools.count()
        self._key_of: dict[str, str] = {}

    async def start(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        seed: int,
        dtype: str | None = None,
        deadline_s: float = 600.0,
        **kind: bool,
    ) -> Self:
        """Start vLLM with the weights of a model folder and serve version 0.

        dtype: of weights and activations; None is float32 on a CPU and bfloat16 on a GPU.
        deadline_s: of one request, `cluster.call_deadline_s`. kind: see `engine_args`.
        Blocks the event loop meanwhile, so the deadline of a start is the caller's to keep.
        Raises `RuntimeError` where vLLM cannot start, `EngineLostError` where it was killed.
        """
        self._config = config
        self._deadline_s = deadline_s
        args = engine_args(config, model_path, seed=seed, dtype=dtype, **kind)
        try:
            self._llm = AsyncLLM.from_engine_args(args)
        except RuntimeError as error:
            raise start_failure(self.name, error) from error
        self._stops = StopTable(self._llm.get_tokenizer())
        self._tap = TapReader(self._llm)
        self._memory = HeldMemory(self._llm, self._ask, sleeps=args.enable_sleep_mode)
        # Of the objects that the imports left behind none is garbage; without this, a full
        # collection among them stops all requests for more than half a second, again and again.
        gc.collect()
        gc.freeze()
        await self._call_workers("settle")
        await self._call_workers("weights_guard")
        self._serving.set()
        self._idle.set()
        return self

    @property
    def version(self) -> int:
        """Weight version that is served now."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Generator.generate`."""
        check_request(request, self._config.max_model_len)
        if request.request_id in self._key_of:
            raise ValueError(f"request_id={request.request_id}: a request of that name is running")
        key = f"{next(self._keys)}"
        self._key_of[request.request_id] = key
        try:
            async with asyncio.timeout(self._deadline_s):
                while not self._serving.is_set():
                    await self._serving.wait()
                if self._failure is not None:
                    raise RuntimeError(f"{self.name} refuses to generate: {self._failure}")
                with self._alive(), self._counted():
                    return await self._run(request, key)
        except TimeoutError as error:
            raise RuntimeError(
                f"{self.name}: {request.request_id} ran past its deadline of "
                f"{self._deadline_s:g} s (cluster.call_deadline_s)"
            ) from error
        finally:
            del self._key_of[request.request_id]

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Run requests at once; results in order."""
        return list(await asyncio.gather(*map(self.generate, requests)))

    async def _run(self, request: GenerateRequest, key: str) -> Generation:
        stop_ids, stop_strings = self._stops.split(request.stop)
        params = sampling_params(request, key, stop_ids, stop_strings)
        version = self._version
        prompt = {"type": "token", "prompt_token_ids": list(request.token_ids)}
        last = None
        try:
            async with aclosing(self._llm.generate(prompt, params, key)) as outputs:
                async for result in outputs:
                    last = result
        except BaseException:  # cancelled, past its deadline, or the engine died
            self._tap.forget(key)
            raise
        assert last is not None, "vLLM ends every request with an output"
        record = await self._tap.take(key)
        num_cached = last.num_cached_tokens or 0
        return to_generation(request, last.outputs[0], record, stop_ids, version, num_cached)

    async def abort(self, request_id: str) -> None:
        """See `Generator.abort`; nothing happens where no such request is running."""
        if (key := self._key_of.get(request_id)) is not None:
            await self._llm.abort(key)

    async def entropies(self, request_id: str) -> tuple[float, ...]:
        """See `Generator.entropies`."""
        if (key := self._key_of.get(request_id)) is None:
            raise ValueError(f"request_id={request_id}: expected a running request")
        entropies, _, _ = await self._tap.peek(key)
        return tuple(entropies)

    @property
    def can_serve(self) -> bool:
        """See `Generator.can_serve`; while it is paused requests wait, which is no refusal."""
        return self._failure is None

    async def pause(self) -> None:
        """Let running requests end, hold new ones back, drop the prefix cache."""
        self._serving.clear()
        await self._drain()

    async def sleep(self) -> None:
        """Let running requests end, give up weights and KV cache; safe to call twice."""
        await self.pause()
        with self._errand():
            await self._call_workers("weights_drop")
            await self._memory.give_up()

    async def wake(self, part: str) -> None:
        """See `HeldMemory.wake`."""
        with self._errand():
            await self._memory.wake(part)

    async def resume(self) -> None:
        """Serve again; raises `RuntimeError` while the weights are not proven."""
        if self._updating or not self._memory.can_compute:
            await self.refuse("it was to serve in the middle of a weight update")
        if self._failure is None:
            await self._ask(self._llm.resume_generation())
        self._serving.set()
        if self._failure is not None:
            raise RuntimeError(f"{self.name} cannot serve: {self._failure}")

    async def refuse(self, reason: str) -> None:
        """Refuse all requests, those that wait included, until an update has gone through.

        The first reason is kept. A dead engine refuses as well.
        """
        self._failure = self._failure or reason
        self._updating = False
        self._serving.set()  # whoever waits gets the reason
        with suppress(RuntimeError):
            await self._drain()
            await self._call_workers("weights_reject", reason)

    async def _drain(self) -> None:
        """Wait until nothing runs; requests let in a moment ago may not have reached vLLM yet."""
        await self._idle.wait()
        await self._ask(self._llm.pause_generation(mode="wait", clear_cache=True))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One request that `_drain` waits for."""
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Say who is dead, or whose vLLM has failed: it raises plain `Exception` for a call that
        ended in its core, the last of a dying one among them.
        """
        try:
            yield
        except EngineDeadError as error:
            self._failure = self._failure or "it is dead"
            raise EngineLostError(f"{self.name} is dead; its log file has the reason") from error
        except Exception as error:
            if type(error) is not Exception:
                raise
            self._failure = self._failure or f"vLLM failed: {error}"
            raise EngineLostError(
                f"{self.name}: vLLM failed: {error}; its log file has the reason"
            ) from error

    async def pulse(self) -> None:
        """Answer as soon as vLLM does, at once while it is at an errand of the weight transfer.

        Raises `EngineLostError` where it is dead or gives running requests no token any more.
        """
        if self._num_errands:
            self._progress = Progress()
            return
        num_tokens = (await self._call_workers("tap_count"))[0]
        if (stuck_s := self._progress.stuck_s(num_tokens, self._num_running)) is not None:
            raise EngineLostError(
                f"{self.name} has given its {self._num_running} requests no token for "
                f"{stuck_s:.0f} s; probable cause: its scheduler or a kernel hangs"
            )

    @contextmanager
    def _errand(self) -> Iterator[None]:
        """vLLM's core is at something with a deadline of its own, and answers nothing else."""
        self._num_errands += 1
        try:
            yield
        finally:
            self._num_errands -= 1

    async def _ask(self, call: Awaitable[Any]) -> Any:
        """What vLLM answers; it leaves the last calls before its death without an answer."""
        task = asyncio.ensure_future(call)
        try:
            with self._alive():
                while not task.done():
                    await asyncio.wait({task}, timeout=DEATH_CHECK_S)
                    if self._llm.errored and not task.done():
                        raise EngineDeadError
                return task.result()
        finally:
            task.cancel()

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension`; answers by worker."""
        answers: list[Any] = await self._ask(self._llm.collective_rpc(method, args=args))
        return answers

    async def layout(self) -> list[tuple[list[ShardLayout], Whereabouts]]:
        """What each worker wants of which tensors, and where it is; traced once per worker.

        Raises `ValueError` where vLLM's loader does something that no rectangle describes.
        """
        with self._errand():
            found = await self._call_workers("weights_layout")
        for worker, (failure, _) in enumerate(found):
            if failure is not None:
                raise ValueError(f"{self.name}, worker {worker}: {failure}")
        return [pickle.loads(answer) for _, answer in found]

    async def connect_weights(self, link: WeightLink) -> None:
        """Join a link of the trainer; returns when all ranks of it have joined.

        Raises `RuntimeError` where they do not; requests are served as before. An update that was
        left unfinished is given up.
        """
        if self._updating:
            await self.refuse("an update was left unfinished")
        request = WeightTransferInitRequest(init_info=link.to_plain())
        with self._errand():
            await self._ask(self._llm.init_weight_transfer_engine(request))
        if (reason := await self._failure_of_workers()) is not None:
            raise RuntimeError(f"{self.name}: joining the weight transfer failed: {reason}")

    async def receive_weights(self, version: int) -> None:
        """Take the weights that are being sent; comes after `pause`.

        Consumes: the buckets of the link's plan. Unblocked by: the last one, or the deadline of
        the link. Raises `RuntimeError` that names tensor, ranks and bucket; from then on
        requests are refused.
        """
        if self._serving.is_set():
            raise RuntimeError(f"{self.name}: an update begins with pause(), it is not paused")
        if self._updating:
            raise RuntimeError(f"{self.name}: an update is under way; finish or refuse it first")
        self._failure, self._updating = None, True
        request = WeightTransferUpdateRequest(update_info={"version": version})
        with self._errand():
            await self._ask(self._llm.start_weight_update())
            await self._ask(self._llm.update_weights(request))
        await self._check_workers(version)

    async def confirm_weights(self, version: int, expected: Sequence[np.ndarray]) -> None:
        """Compare what was received with the trainer's digests, by worker; pack for the kernels.

        Raises `RuntimeError` that names the first tensor that differs; see `receive_weights`.
        """
        if not self._updating:
            raise RuntimeError(f"{self.name}: no weights to confirm: {self._failure}")
        with self._errand():
            await self._call_workers("weights_verify", version, pickle.dumps(list(expected)))
            await self._check_workers(version)
            await self._ask(self._llm.finish_weight_update(str(version)))
        await self._check_workers(version)
        self._version, self._updating = version, False
        self._memory.filled()

    async def memory(self) -> list[dict[str, float]]:
        """`WorkerExtension.memory_taken` by worker."""
        return await self._call_workers("memory_taken")

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a fixed prompt's tokens after the first, at temperature 1; not served."""
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        key = f"probe {next(self._keys)}"
        output = None
        with self._alive():
            await self._llm.resume_generation()
            async with aclosing(self._llm.generate(prompt, probe_params(), key)) as outputs:
                async for result in outputs:
                    output = result
        assert output is not None, "vLLM ends every request with an output"
        return [
            choices[token].logprob
            for choices, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]

    async def _check_workers(self, version: int) -> None:
        """Ask all workers what went wrong; one failure is everybody's."""
        if (found := await self._failure_of_workers()) is not None:
            reason = f"the update to version {version} failed: {found}"
            await self.refuse(reason)
            raise RuntimeError(f"{self.name}: {reason}")

    async def _failure_of_workers(self) -> str | None:
        """Causes first, then what followed from them: a worker that fails leaves its peers."""
        failures = await self._call_workers("weights_failure")
        found = [(failure, worker) for worker, failure in enumerate(failures) if failure]
        found.sort(key=lambda item: item[0][0])
        return "; ".join(f"worker {worker}: {reason}" for (_, reason), worker in found) or None

    async def close(self) -> None:
        """End vLLM and its processes; safe to call twice."""
        if hasattr(self, "_llm"):
            self._llm.shutdown(timeout=CLOSE_GRACE_S)
            del self._llm
            gc.unfreeze()
