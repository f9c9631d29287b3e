"""One vLLM engine: generation with exact entropies, and weight updates from the trainer.

The engine lives in a process of its own, whose environment `environment.set_vllm_environment` has
prepared; all arguments and results are picklable. vLLM adds an engine-core process and one worker
per tensor-parallel rank, which end with the host (see `plugin`). A weight update is

    pause -> receive_weights -> verify_weights -> compute_prompt_log_probs (optional) -> resume

An engine starts without weights, unless it is asked to load the weights of its model folder, and
refuses requests until the first update. Requests that arrive during an update wait. If a step of
the update fails, or `refuse_requests` is called, requests are refused with the reason until a later
update succeeds. `pause` waits for the end of running requests, or holds them:

* After waiting, every request is computed with one weight version, `Generation.version`.
* A held request (`weight_sync.in_flight`) goes on after its last token. vLLM drops its KV cache
  with the prefix cache and computes it again from all tokens and images of the request, including
  images that the request had found in the prefix cache (see `ImagePrompts`), so that no request
  uses keys, values or image features of older weights. vLLM labels each output of its core
  with the version that computed it: `Generation.versions` has the version of every token. The
  request goes on as soon as digests are verified, but its result is not returned before `resume`.
  If the update fails or is refused, the request fails, too.

On GPUs shared with the trainer the engine may `sleep` in any state. It is woken for an update:
"weights" before `receive_weights`, "cache" after `verify_weights`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mega_agentrl.config.enums import Dtype
from mega_agentrl.generator.engine_args import engine_args
from mega_agentrl.generator.image_prompts import ImagePrompts, check_images
from mega_agentrl.generator.progress_monitor import ProgressMonitor
from mega_agentrl.generator.sampling import (
    StopTokenTable,
    aborted_generation,
    check_request,
    prompt_logp_params,
    sampling_params,
    to_generation,
    to_routes,
)
from mega_agentrl.generator.sleep_mode import SleepController
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.types.errors import EngineLostError, EngineRefusalError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from vllm.inputs.engine import MultiModalInput, TokensInput

    from mega_agentrl.config.sections.runtime import EngineConfig
    from mega_agentrl.reshard.device_location import DeviceLocation
    from mega_agentrl.reshard.layout import PackedLayout
    from mega_agentrl.reshard.mapping.model_shape import MoeShape
    from mega_agentrl.reshard.session import TransferSession
    from mega_agentrl.types.records import GenerateRequest, Generation


NO_WEIGHTS_REASON = "it has no weights yet: no weight update has been verified since its start"
DEATH_POLL_S = 0.5
"""Seconds between checks whether vLLM has died."""
SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds that vLLM's processes get to end by themselves before they are killed."""


def to_start_error(name: str, error: RuntimeError) -> RuntimeError:
    """Return the error to raise when vLLM fails to start with `error`.

    This is an `EngineLostError` if a signal may have ended vLLM's core, so that another start may
    succeed. Only the message of vLLM's error says so: it contains a negative exit code, or none if
    the core had not ended yet.
    """
    killed = re.search(r"core proc\(s\): ({}|.*: -\d)", str(error))
    error_class = EngineLostError if killed else RuntimeError
    return error_class(f"{name} did not start; its log file has the reason: {error}")


class Engine:
    """Implements the `Generator` protocol of `types` with one vLLM engine."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self._version = 0
        self._refusal_reason: str | None = None
        self._is_updating = False
        self._is_holding = False
        self._serving_event, self._idle_event = asyncio.Event(), asyncio.Event()
        self._running: set[asyncio.Timeout] = set()
        self._num_blocking_calls = 0
        self._num_finished_tokens = 0
        self._progress = ProgressMonitor()
        self._next_key = itertools.count()
        self._key_of: dict[str, str] = {}
        self._aborted_ids: set[str] = set()
        self._moe: MoeShape | None = None

    async def start(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        seed: int,
        dtype: Dtype = Dtype.auto,
        load_weights: bool = False,
        deadline_s: float = 600.0,
        deterministic: bool = False,
        colocated: bool = False,
        return_routes: bool = False,
    ) -> Self:
        """Start vLLM; with `load_weights` it then serves version 0.

        This blocks the event loop, so the caller has to enforce a deadline.

        Args:
            config: Engine settings.
            model_path: Model folder.
            seed: Seed of the engine.
            dtype: Dtype of weights and activations.
            load_weights: Whether to read the weights of the folder. Otherwise requests are refused
                until a weight update is verified.
            deadline_s: Deadline of one request, `cluster.call_timeout_s`.
            deterministic: Batch no requests together, and do not cache prefixes.
            colocated: Enable vLLM's sleep mode on a GPU.
            return_routes: Return the experts of each token of a model that has experts.

        Raises:
            RuntimeError: If vLLM cannot start.
            EngineLostError: If vLLM was killed.
        """
        self._config = config
        self._request_deadline_s = deadline_s
        self._image_slots = asyncio.Semaphore(config.max_num_seqs)
        self._image_prompts = ImagePrompts(model_path)
        if return_routes:
            self._moe = ModelShape.from_folder(model_path).moe
        args = engine_args(
            config,
            model_path,
            seed=seed,
            dtype=dtype,
            load_weights=load_weights,
            deterministic=deterministic,
            colocated=colocated,
            pixels_per_token=self._image_prompts.pixels_per_token,
            with_routes=self._moe is not None,
        )
        try:
            self._llm = AsyncLLM.from_engine_args(args)
        except RuntimeError as error:
            raise to_start_error(self.name, error) from error
        self._stop_table = StopTokenTable(self._llm.get_tokenizer())
        self._sleep_controller = SleepController(
            self._llm,
            self._await_vllm,
            has_sleep_mode=args.enable_sleep_mode,
            has_weights=load_weights,
        )
        # Without this, full collections of the many objects that the imports created would
        # repeatedly stop all requests for more than half a second.
        gc.collect()
        gc.freeze()
        await self.call_workers("finish_startup")
        if self._moe is not None:
            await self.call_workers("routes_install")
        await self.call_workers("weights_install_guard")
        if load_weights:
            await self._await_vllm(self._llm.update_weight_version(str(self._version)))
        else:
            self._refusal_reason = NO_WEIGHTS_REASON
            await self.call_workers("weights_release")
        self._serving_event.set()
        self._idle_event.set()
        return self

    @property
    def version(self) -> int:
        """Weight version that is served."""
        return self._version

    async def generate(
        self,
        request: GenerateRequest,
        load_images: Callable[[GenerateRequest], Awaitable[GenerateRequest]] | None = None,
    ) -> Generation:
        """Run a request, as `Generator` says.

        Args:
            request: The request.
            load_images: Returns the request with the pixels of its images, unless it has them. The
                request can be aborted meanwhile.
        """
        check_request(request, self._config.max_model_len)
        with self._register(request.request_id) as key:
            if load_images is not None:
                request = await load_images(request)
            check_images(request, self._image_prompts.tokens)
            try:
                async with asyncio.timeout(self._request_deadline_s) as deadline:
                    await self._wait_until_serving()
                    with self._translate_vllm_errors(), self._track_running(deadline):
                        generation = await self._generate_in_vllm(request, key)
                    if self._is_holding:
                        await self._wait_until_serving()
                    return generation
            except TimeoutError as error:
                if self._refusal_reason is not None:
                    raise self._refusal() from error
                raise RuntimeError(
                    f"{self.name}: {request.request_id} ran past its deadline of "
                    f"{self._request_deadline_s:g} s (cluster.call_timeout_s)"
                ) from error

    @contextmanager
    def _register(self, request_id: str) -> Iterator[str]:
        """Let `abort` find a request until it ends; the value is the request's key in vLLM."""
        if request_id in self._key_of:
            raise ValueError(f"request_id={request_id}: a request with this id is already running")
        self._key_of[request_id] = key = f"{next(self._next_key)}"
        try:
            yield key
        finally:
            del self._key_of[request_id]
            self._aborted_ids.discard(request_id)

    async def _wait_until_serving(self) -> None:
        """Wait for the end of an update; raise `EngineRefusalError` if requests are refused."""
        while not self._serving_event.is_set():
            await self._serving_event.wait()
        if self._refusal_reason is not None:
            raise self._refusal()

    def _refusal(self, operation: str = "generate") -> EngineRefusalError:
        return EngineRefusalError(self.name, operation, self._refusal_reason or "")

    async def _generate_in_vllm(self, request: GenerateRequest, key: str) -> Generation:
        """Run a request in vLLM; one with images waits while `max_num_seqs` others have images.

        vLLM keeps the patches of a request, 24 bytes for each pixel, from its arrival to its end.
        Requests that wait are running ones for `pause`: without `hold` they run before it returns,
        with `hold` they stay behind those that are held.
        """
        async with self._image_slots if request.images else nullcontext():
            prompt = await self._image_prompts.render(request)
            if request.request_id in self._aborted_ids:  # before vLLM knew its key
                return aborted_generation(request, self._version)
            return await self._run_prompt(request, prompt, key)

    async def _run_prompt(
        self, request: GenerateRequest, prompt: TokensInput | MultiModalInput, key: str
    ) -> Generation:
        stop_ids, stop_strings = self._stop_table.split_stop_strings(request.stop)
        banned_ids = self._image_prompts.banned_ids
        params = sampling_params(request, stop_ids, stop_strings, banned_ids)
        last = None
        async with aclosing(self._llm.generate(prompt, params, key)) as outputs:
            async for result in outputs:
                last = result
        assert last is not None, "vLLM ends every request with an output"
        num_cached = last.num_cached_tokens or 0
        output = last.outputs[0]
        generation = to_generation(
            request,
            output,
            stop_ids,
            self._version,
            num_cached,
            routes=None if self._moe is None else to_routes(request, output, self._moe),
        )
        self._num_finished_tokens += len(generation.token_ids)
        return generation

    async def abort(self, request_id: str) -> None:
        """End a running request early; do nothing if there is no such request.

        A request that has not reached vLLM yet ends without a token instead of reaching it.
        """
        if (key := self._key_of.get(request_id)) is not None:
            self._aborted_ids.add(request_id)
            await self._llm.abort(key)

    def _num_partial_tokens(self) -> int:
        """Return how many tokens vLLM has returned up to now for running requests."""
        states = self._llm.output_processor.request_states.values()
        return sum(len(state.logprobs_processor.logprobs or ()) for state in states)

    @property
    def can_serve(self) -> bool:
        """Whether requests are accepted; a paused engine accepts them and lets them wait."""
        return self._refusal_reason is None

    async def pause(self, hold: bool = False) -> None:
        """Hold new requests back, and drop the caches of prefixes and of images' features.

        Args:
            hold: Hold running requests, too, until `resume`; else wait for their end.
        """
        self._serving_event.clear()
        if hold:
            self._is_holding = True
            await self._await_vllm(self._llm.pause_generation(mode="keep", clear_cache=True))
        else:
            await self._drain()

    async def sleep(self) -> None:
        """Let running requests end, then free weights and KV cache; may be called twice."""
        await self.pause()
        with self._blocking_call():
            await self.call_workers("weights_release")
            await self._sleep_controller.sleep()

    async def wake_up(self, part: str) -> None:
        """Allocate GPU memory for `part`: "weights" before an update, "cache" after it."""
        with self._blocking_call():
            await self._sleep_controller.wake(part)

    async def resume(self) -> None:
        """Serve again; raises `EngineRefusalError` while the weights are not verified."""
        if self._is_updating or not self._sleep_controller.can_compute:
            await self.refuse_requests("it was resumed in the middle of a weight update")
        if self._refusal_reason is None:
            await self._await_vllm(self._llm.resume_generation())
            self._is_holding = False
        self._serving_event.set()
        if self._refusal_reason is not None:
            raise self._refusal("serve")

    async def refuse_requests(self, reason: str) -> None:
        """Refuse all requests, including those that wait or are held, until an update succeeds.

        The first reason is kept. A dead engine refuses as well.
        """
        self._refusal_reason = self._refusal_reason or reason
        self._is_updating = False
        if self._is_holding:
            self._is_holding = False
            self._fail_running()
        self._serving_event.set()  # waiting requests fail with the reason
        with suppress(RuntimeError):
            await self._drain()
            await self.call_workers("weights_reject", reason)

    async def _drain(self) -> None:
        """Wait until nothing runs, including requests that have not reached vLLM yet."""
        await self._idle_event.wait()
        await self._await_vllm(self._llm.pause_generation(mode="wait", clear_cache=True))

    @contextmanager
    def _track_running(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Record one request that `_drain` waits for and `_fail_running` ends."""
        self._running.add(deadline)
        self._idle_event.clear()
        try:
            yield
        finally:
            self._running.discard(deadline)
            if not self._running:
                self._idle_event.set()

    def _fail_running(self) -> None:
        """End all running requests, with the reason why requests are refused."""
        now_s = asyncio.get_running_loop().time()
        for deadline in self._running:
            if not deadline.expired():
                deadline.reschedule(now_s)

    @contextmanager
    def _translate_vllm_errors(self) -> Iterator[None]:
        """Turn the death or failure of vLLM into an `EngineLostError` that names the engine.

        vLLM raises plain `Exception` for a call that failed in its core.
        """
        try:
            yield
        except EngineDeadError as error:
            self._refusal_reason = self._refusal_reason or "it is dead"
            raise EngineLostError(f"{self.name} is dead; its log file has the reason") from error
        except Exception as error:
            if type(error) is not Exception:
                raise
            self._refusal_reason = self._refusal_reason or f"vLLM failed: {error}"
            raise EngineLostError(
                f"{self.name}: vLLM failed: {error}; its log file has the reason"
            ) from error

    async def check_health(self) -> None:
        """Return when vLLM answers, or at once if it has returned tokens since the last check.

        Workers are thus not called while they compute, which would interrupt asynchronous
        scheduling. During a blocking call this returns at once, too.

        Raises:
            EngineLostError: If vLLM is dead or has stopped producing tokens for running requests.
        """
        if self._num_blocking_calls:
            self._progress = ProgressMonitor()
            return
        num_tokens = self._num_finished_tokens + self._num_partial_tokens()
        if num_tokens <= max(self._progress.num_tokens, 0):
            await self.call_workers("check_health")
        num_running = 0 if self._is_holding else len(self._running)
        quiet_s = self._progress.quiet_s(num_tokens, num_running)
        if quiet_s > self._config.stuck_limit_s(has_answered=num_tokens > 0):
            raise EngineLostError(
                f"{self.name} has produced no token for its {num_running} requests in "
                f"{quiet_s:.0f} s (engine.stuck_timeout_s={self._config.stuck_timeout_s:g}); "
                "probable cause: its scheduler or a kernel hangs"
            )

    @contextmanager
    def _blocking_call(self) -> Iterator[None]:
        """Skip health checks during a call for which vLLM's core answers no others."""
        self._num_blocking_calls += 1
        try:
            yield
        finally:
            self._num_blocking_calls -= 1

    async def _await_vllm(self, call: Awaitable[Any]) -> Any:
        """Return vLLM's answer; raise if vLLM dies, because it then leaves calls unanswered."""
        task = asyncio.ensure_future(call)
        try:
            with self._translate_vllm_errors():
                while not task.done():
                    await asyncio.wait({task}, timeout=DEATH_POLL_S)
                    if self._llm.errored and not task.done():
                        raise EngineDeadError
                return task.result()
        finally:
            task.cancel()

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` and return the answers by worker."""
        answers: list[Any] = await self._await_vllm(self._llm.collective_rpc(method, args=args))
        return answers

    async def layout(self) -> list[tuple[PackedLayout, DeviceLocation]]:
        """Return the shards and the location of each worker; traced when the worker starts.

        Raises:
            ValueError: If vLLM's loader does something that no rectangle describes.
        """
        with self._blocking_call():
            answers = await self.call_workers("weights_layout")
        for worker, (failure, _) in enumerate(answers):
            if failure is not None:
                raise ValueError(f"{self.name}, worker {worker}: {failure}")
        return [pickle.loads(answer) for _, answer in answers]

    async def join_weight_transfer(self, session: TransferSession, first_rank: int) -> None:
        """Give up an unfinished update, and join a transfer session.

        Returns when all ranks of the session have joined.

        Args:
            session: The session, with the engine's part of the plan.
            first_rank: Rank of the engine's first worker.

        Raises:
            RuntimeError: If not all ranks join; requests are served as before.
        """
        if self._is_updating:
            await self.refuse_requests("an update was left unfinished")
        request = WeightTransferInitRequest(init_info=session.to_init_info(first_rank))
        with self._blocking_call():
            await self._await_vllm(self._llm.init_weight_transfer_engine(request))
        if (reason := await self._worker_failures()) is not None:
            raise RuntimeError(f"{self.name}: joining the weight transfer failed: {reason}")

    async def receive_weights(self, version: int, contents: Sequence[str] = ("weights",)) -> None:
        """Receive the weights that the trainer is sending; called after `pause`.

        Waits for the last bucket of the session's plan, or the deadline of the session.

        Args:
            version: Weight version.
            contents: Sessions of the link in which the trainer sends, in order.

        Raises:
            RuntimeError: Naming tensor, ranks and bucket; requests are then refused.
        """
        if self._serving_event.is_set():
            raise RuntimeError(f"{self.name}: an update begins with pause(), it is not paused")
        if self._is_updating:
            raise RuntimeError(f"{self.name}: an update is in progress; finish or refuse it first")
        self._refusal_reason, self._is_updating = None, True
        request = WeightTransferUpdateRequest(
            update_info={"version": version, "contents": [str(content) for content in contents]}
        )
        with self._blocking_call():
            await self._await_vllm(self._llm.start_weight_update())
            await self._await_vllm(self._llm.update_weights(request))
        await self._check_workers(version)

    async def verify_weights(self, version: int, expected: Sequence[np.ndarray]) -> None:
        """Compare the received weights with the trainer's digests and pack them for the kernels.

        Args:
            version: Weight version.
            expected: Digests by worker.

        Raises:
            RuntimeError: Naming the first tensor that differs; requests are then refused.
        """
        if not self._is_updating:
            raise RuntimeError(f"{self.name}: no weights to verify: {self._refusal_reason}")
        with self._blocking_call():
            await self.call_workers("weights_verify", version, pickle.dumps(list(expected)))
            await self._check_workers(version)
            await self._await_vllm(self._llm.finish_weight_update(str(version)))
        await self._check_workers(version)
        self._version, self._is_updating = version, False
        self._sleep_controller.mark_weights_verified()

    async def memory(self) -> list[dict[str, float]]:
        """Return the peak memory of every worker in MiB, by kind of memory."""
        return await self.call_workers("peak_memory_mib")

    async def compute_prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of a prompt's tokens after the first, at temperature 1.

        This works while the engine is paused, and lets held requests go on.

        Raises:
            EngineRefusalError: If requests are refused.
        """
        if self._refusal_reason is not None:
            raise self._refusal()
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        key = f"probe {next(self._next_key)}"
        output = None
        with self._translate_vllm_errors():
            await self._llm.resume_generation()
            async with aclosing(self._llm.generate(prompt, prompt_logp_params(), key)) as outputs:
                async for result in outputs:
                    output = result
        assert output is not None, "vLLM ends every request with an output"
        return [
            choices[token].logprob
            for choices, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]

    async def probe_layers(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the values of a prompt's tokens by point (`reshard.verify.layer_mismatch`).

        For an engine without tensor parallelism, in eager mode.

        Raises:
            RuntimeError: If requests are refused.
        """
        await self.call_workers("layer_probe_start", len(token_ids))
        try:
            log_probs = await self.compute_prompt_log_probs(token_ids)
        finally:
            answers = await self.call_workers("layer_probe_finish")
        values: dict[str, np.ndarray] = pickle.loads(answers[0])
        return values | {"log_probs": np.array(log_probs)}

    async def _check_workers(self, version: int) -> None:
        """If any worker has failed, refuse all requests and raise `RuntimeError`."""
        if (answers := await self._worker_failures()) is not None:
            reason = f"the update to version {version} failed: {answers}"
            await self.refuse_requests(reason)
            raise RuntimeError(f"{self.name}: {reason}")

    async def _worker_failures(self) -> str | None:
        """Return the failures of all workers, with failures that a lost peer caused at the end."""
        failures = await self.call_workers("weights_failure")
        answers = [(failure, worker) for worker, failure in enumerate(failures) if failure]
        answers.sort(key=lambda item: item[0][0])
        return "; ".join(f"worker {worker}: {reason}" for (_, reason), worker in answers) or None

    async def close(self) -> None:
        """End vLLM and its processes; may be called twice."""
        if hasattr(self, "_llm"):
            self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            del self._llm
            gc.unfreeze()
