"""One vLLM engine: generation with exact entropies, and weights that arrive over the bridge.

Lives in a process of its own, whose environment `environment.set_environment` has prepared;
everything in and out is picklable. vLLM adds an engine-core process and one worker per
tensor-parallel rank, which end with the host (see `plugin`).

Serving states: it serves -> `pause` -> paused -> `resume` -> it serves. `receive_weights` needs no
pause before it. Requests that arrive meanwhile wait; after a failed update they are refused with
the reason until a later update succeeds.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mega_agentrl.generator.plugin import TRANSFER_BACKEND
from mega_agentrl.generator.sampling import (
    StopTable,
    check_request,
    sampling_params,
    to_generation,
)
from mega_agentrl.generator.tap_reader import TapReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from mega_agentrl.config.schema import EngineConfig
    from mega_agentrl.reshard.transport import WeightLink
    from mega_agentrl.types.records import GenerateRequest, Generation


CLOSE_GRACE_S = 2.0
"""Time vLLM's processes get to end by themselves before they are killed."""


class Engine:
    """Implements `types.ports.Generator` for one vLLM engine."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self._version = 0
        self._failure: str | None = None
        self._serving = asyncio.Event()
        self._keys = itertools.count()
        self._key_of: dict[str, str] = {}

    async def start(
        self, config: EngineConfig, model_path: str, *, seed: int, dtype: str | None = None
    ) -> Self:
        """Start vLLM with the weights of a model folder and serve version 0.

        dtype: of weights and activations; None is float32 on a CPU and bfloat16 on a GPU.
        Blocks the event loop meanwhile, so the deadline `config.start_deadline_s` is the
        caller's to keep. Raises `RuntimeError` where vLLM cannot start.
        """
        self._config = config
        args = engine_args(config, model_path, seed=seed, dtype=dtype)
        try:
            self._llm = AsyncLLM.from_engine_args(args)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name} did not start; its log file has the reason: {error}"
            ) from error
        self._stops = StopTable(self._llm.get_tokenizer())
        self._tap = TapReader(self._llm)
        # Of the objects that the imports left behind none is garbage; without this, a full
        # collection among them stops all requests for more than half a second, again and again.
        gc.collect()
        gc.freeze()
        await self._llm.collective_rpc("settle")
        self._serving.set()
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
            async with asyncio.timeout(self._config.call_deadline_s):
                await self._serving.wait()
                if self._failure is not None:
                    raise RuntimeError(f"{self.name} refuses to generate: {self._failure}")
                return await self._run(request, key)
        except TimeoutError as error:
            raise RuntimeError(
                f"{self.name}: {request.request_id} ran past its deadline of "
                f"{self._config.call_deadline_s:g} s (engine.call_deadline_s)"
            ) from error
        except EngineDeadError as error:
            raise RuntimeError(f"{self.name} is dead; its log file has the reason") from error
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
        output = None
        try:
            async with aclosing(self._llm.generate(prompt, params, key)) as outputs:
                async for result in outputs:
                    output = result.outputs[0]
        except BaseException:  # cancelled, past its deadline, or the engine died
            self._tap.forget(key)
            raise
        assert output is not None, "vLLM ends every request with an output"
        record = await self._tap.take(key)
        return to_generation(request, output, record, stop_ids, version)

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

    async def pause(self) -> None:
        """Let running requests end, hold new ones back, drop the prefix cache."""
        self._serving.clear()
        await self._llm.pause_generation(mode="wait", clear_cache=True)

    async def resume(self) -> None:
        """Serve again."""
        await self._llm.resume_generation()
        self._serving.set()

    async def connect_weights(self, link: WeightLink) -> None:
        """Join the transport group of the trainer; returns when all ranks of it have joined."""
        request = WeightTransferInitRequest(init_info=link.to_plain())
        await self._llm.init_weight_transfer_engine(request)

    async def receive_weights(self, version: int) -> None:
        """Take the weights that the trainer ranks are sending, and serve them as `version`.

        Consumes: messages of the plan from every trainer rank. Unblocked by: the last one, or
        the transport deadline. Raises `RuntimeError` that names tensor, rank and bucket; from
        then on requests are refused.
        """
        await self.pause()
        self._failure = f"the update to version {version} has not finished"
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(
                WeightTransferUpdateRequest(update_info={"version": version})
            )
            await self._llm.finish_weight_update(str(version))
        except Exception as error:
            self._failure = f"the update to version {version} failed: {error}"
            raise RuntimeError(f"{self.name}: {self._failure}") from error
        else:
            self._version = version
            self._failure = None
        finally:
            await self.resume()

    async def close(self) -> None:
        """End vLLM and its processes; safe to call twice."""
        if hasattr(self, "_llm"):
            self._llm.shutdown(timeout=CLOSE_GRACE_S)
            del self._llm
            gc.unfreeze()


def engine_args(
    config: EngineConfig, model_path: str, *, seed: int, dtype: str | None
) -> AsyncEngineArgs:
    """vLLM's arguments."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and config.block_size % 32:
        raise ValueError(
            f"engine.block_size={config.block_size}: expected a multiple of 32, the only sizes "
            "vLLM's CPU attention has"
        )
    options: dict[str, Any] = {}
    if on_gpu:
        options["gpu_memory_utilization"] = config.memory_fraction
    tap = "tap_v2:EntropyTapV2" if on_gpu else "tap_v1:EntropyTapV1"
    return AsyncEngineArgs(
        model=model_path,
        dtype=dtype or ("bfloat16" if on_gpu else "float32"),
        seed=seed,
        tensor_parallel_size=config.tensor,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_concurrent,
        max_num_batched_tokens=max(8192, config.max_model_len),
        block_size=config.block_size,
        enforce_eager=config.eager or not on_gpu,
        enable_prefix_caching=True,
        disable_log_stats=True,
        logits_processors=[f"mega_agentrl.generator.{tap}"],
        worker_extension_cls="mega_agentrl.generator.worker_extension.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        **options,
    )
