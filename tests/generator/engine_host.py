"""Hosts an `Engine` in a process of its own, as a Ray actor does, and calls its methods.

A call that fails raises the project's error, or a `RuntimeError` with the text of another.

vLLM's environment variables and imports thus stay out of the test process.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import Dtype

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from mega_agentrl.config.sections.runtime import EngineConfig

DEADLINE_S = 240.0


class EngineHost:
    """The test's side: `call` waits for the result, `begin` returns a future."""

    def __init__(
        self,
        config: EngineConfig,
        model: Path,
        log_path: Path,
        *,
        wait: bool = True,
        on_gpu: bool = False,
        dtype: Dtype = Dtype.auto,
        load_weights: bool = True,
        return_routes: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(child_end, config, str(model), log_path, on_gpu),
            kwargs={"dtype": dtype, "load_weights": load_weights, "return_routes": return_routes},
            daemon=False,
        )
        self.process.start()
        child_end.close()
        self._call_ids = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()
        if wait:
            self.call("ready")

    def begin(self, method: str, *args: Any) -> Future[Any]:
        number, future = next(self._call_ids), Future[Any]()
        self._futures[number] = future
        self._pipe.send((number, method, args))
        return future

    def call(self, method: str, *args: Any) -> Any:
        return self.begin(method, *args).result(DEADLINE_S)

    def close(self) -> None:
        if self.process.is_alive():
            self.begin("exit")
            self.process.join(DEADLINE_S)
        if self.process.is_alive():
            self.process.kill()

    def _read(self) -> None:
        try:
            while True:
                number, result, error = self._pipe.recv()
                future = self._futures.pop(number)
                future.set_exception(error) if error else future.set_result(result)
        except (EOFError, OSError):
            for future in list(self._futures.values()):
                future.set_exception(RuntimeError("the engine's host is gone"))


def _serve(
    pipe: Connection,
    config: EngineConfig,
    model: str,
    log_path: Path,
    on_gpu: bool,
    **options: Any,
) -> None:
    from mega_agentrl.generator.environment import set_vllm_environment

    log_path.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log_path.with_suffix(".out"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    set_vllm_environment(config, on_gpu=on_gpu, log_path=log_path)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # tests send functions to the workers
    asyncio.run(_answer_calls(pipe, config, model, options))


async def _answer_calls(
    pipe: Connection, config: EngineConfig, model: str, options: dict[str, Any]
) -> None:
    from mega_agentrl.generator.engine import Engine

    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, pipe.recv())
        except EOFError:
            loop.call_soon_threadsafe(calls.put_nowait, (0, "exit", ()))

    threading.Thread(target=read, daemon=True).start()
    engine = await Engine().start(config, model, seed=1, **options)
    extra = {"version": lambda: _value(engine.version), "ready": lambda: _value(None)}
    extra["rpc"] = lambda *args: engine._llm.collective_rpc(*args)
    extra["start_and_cancel"] = lambda request: _start_and_cancel(engine, request)
    extra["generate_many"] = lambda requests: _generate_many(engine, requests)
    extra["generate_counting_calls"] = lambda requests: _generate_counting_calls(engine, requests)
    extra["num_sampled"] = lambda: _value(engine._num_partial_tokens())
    extra["num_open"] = lambda: _value(len(engine._llm.output_processor.request_states))
    tasks = set()
    while (call := await calls.get())[1] != "exit":
        number, method, args = call
        task = asyncio.create_task(
            _answer(pipe, number, extra.get(method) or getattr(engine, method), args)
        )
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await engine.close()


async def _start_and_cancel(engine: Any, request: Any) -> bool:
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.05)
    return task.cancel()


async def _generate_many(engine: Any, requests: Any) -> list[Any]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def _generate_counting_calls(engine: Any, requests: Any) -> tuple[list[Any], list[str]]:
    """Return the results, and the methods of workers that were called until the last one."""
    called = []
    collective_rpc = engine._llm.collective_rpc

    async def counting_rpc(method: str, *args: Any, **options: Any) -> Any:
        called.append(method)
        return await collective_rpc(method, *args, **options)

    engine._llm.collective_rpc = counting_rpc
    try:
        return await _generate_many(engine, requests), called
    finally:
        engine._llm.collective_rpc = collective_rpc


async def _value(value: Any) -> Any:
    return value


async def _answer(pipe: Connection, number: int, method: Any, args: Any) -> None:
    try:
        answer = (number, await method(*args), None)
    except Exception as error:  # noqa: BLE001 - the test decides what it means
        is_own = type(error).__module__.startswith("mega_agentrl.")
        sent = error if is_own else RuntimeError(f"{type(error).__name__}: {error}")
        answer = (number, None, sent)
    pipe.send(answer)
