"""Keeps the sandbox hosts alive: places, starts, watches and replaces them.

One thread for each host, which goes through: choose a node, start the process, warm its
sandboxes, then take its pulse until it dies or stays silent, and begin again. So a host is
replaced also while nobody calls it. `pick` consumes nothing but time and produces a host that
is up; it waits only while a lost one is being replaced, and is unblocked by its return, its
failure, a deadline or `close`.

A host takes no CPU of Ray's, as engines and policy ranks of one machine take turns on them;
where nodes are set apart for hosts (`HOST_RESOURCE`) it takes 1 of that. The node is chosen
here, not by Ray: only so are they spread evenly, and a place that does not exist is an error at
once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future, as_completed
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mega_agentrl.runtime.remote import RemoteError, gather
from mega_agentrl.runtime.sandbox_host import SandboxHost
from mega_agentrl.runtime.sandbox_link import HostLink
from mega_agentrl.sandbox.supervisor import SandboxLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mega_agentrl.config.sandbox_schema import PythonToolConfig

HOST_RESOURCE = "sandbox_host"
"""Custom resource of nodes that are set apart for hosts: where one has it, hosts go to such nodes
only and each takes 1 of it. A fixed name: it says what the nodes are for, and nothing else does."""

_PLACE_DEADLINE_S = 60.0
_START_DEADLINE_S = 150.0
"""Beyond a sandbox's own deadline to get warm."""

_RETRY_S = 10.0
_PULSE_S = 2.0
_SECOND_LOOK_S = 2.0
_CLOSE_DEADLINE_S = 10.0
_MAX_CALLS = 1_000_000
"""Calls that one host holds at once, nearly all of them waiting in its pool."""

_logger = logging.getLogger(__name__)
_CLOSED = "the sandbox pool is closed"


def choose_node(
    nodes: Sequence[Mapping[str, Any]], resource: str, taken: Mapping[str, int]
) -> str | None:
    """Id of the node for one more host: the one with the fewest; None where none has room.

    nodes: as `ray.nodes()` gives them. resource: what a host takes 1 of; empty for nothing.
    taken: hosts by node id.
    """
    fitting = [
        str(node["NodeID"])
        for node in nodes
        if node["Alive"]
        and (not resource or node["Resources"].get(resource, 0) >= taken.get(node["NodeID"], 0) + 1)
    ]
    return min(fitting, key=lambda node: (taken.get(node, 0), node), default=None)


class HostFailedError(RuntimeError):
    """A host could not be brought up; says which and why."""


class HostKeeper:
    """`config.hosts` hosts; `start` before the first `pick`.

    silence_s: a host that does not answer its pulse for so long is lost.
    """

    def __init__(self, config: PythonToolConfig, log_folder: Path, *, silence_s: float) -> None:
        self._config = config
        self._log_folder = log_folder
        self._silence_s = silence_s
        self._resource = ""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._nodes: dict[int, str] = {}  # where each host is or will be
        self._actors: dict[int, Any] = {}
        self._up: dict[int, HostLink] = {}
        self._coming: set[int] = set()
        self._down: dict[int, str] = {}  # why each of those is not to be had
        self._waiting: list[Future[None]] = []
        self._num_lost = 0

    @property
    def num_replaced(self) -> int:
        """Sandboxes lost so far; a lost host counts with all of its own."""
        with self._lock:
            return self._num_lost + sum(link.num_replaced for link in self._up.values())

    def start(self) -> None:
        """Bring up all hosts; raises `HostFailedError` for the first that fails. Blocks."""
        # Once, so that a host whose node is gone waits for another instead of going anywhere.
        offered = (one["Resources"] for one in ray.nodes() if one["Alive"])
        self._resource = HOST_RESOURCE if any(HOST_RESOURCE in one for one in offered) else ""
        numbers = range(self._config.hosts)
        firsts: list[Future[None]] = [Future() for _ in numbers]
        self._threads = [
            threading.Thread(
                target=self._keep, args=(number, first), name=f"sandbox-host-{number}", daemon=True
            )
            for number, first in zip(numbers, firsts, strict=True)
        ]
        self._coming = set(numbers)
        for thread in self._threads:
            thread.start()
        for first in as_completed(firsts):
            first.result()

    async def pick(self) -> HostLink:
        """The host with the least load.

        Raises `SandboxLostError` where there is none and none is coming back.
        """
        ends_at = time.monotonic() + _START_DEADLINE_S
        while True:
            with self._lock:
                if self._closing.is_set():
                    raise SandboxLostError(_CLOSED, started=False)
                if alive := [link for link in self._up.values() if not link.is_cut]:
                    return min(alive, key=lambda link: link.load)
                if not (self._up or self._coming) or time.monotonic() > ends_at:
                    raise SandboxLostError(self._none_left(), started=False)
                waiter: Future[None] = Future()
                self._waiting.append(waiter)
            try:
                async with asyncio.timeout(ends_at - time.monotonic()):
                    await asyncio.wrap_future(waiter)
            except TimeoutError:
                continue

    def close(self) -> None:
        """End every host; running and waiting calls end at once. Blocks; safe twice."""
        with self._lock:
            self._closing.set()
            links, actors = list(self._up.values()), list(self._actors.values())
            self._up.clear()
        self._wake()
        for link in links:
            link.cut(_CLOSED)
        if actors and ray.is_initialized():
            # Control groups and users of the sandboxes are given back by a host that ends well.
            ending = [actor.close.remote() for actor in actors]
            ray.wait(ending, num_returns=len(ending), timeout=_CLOSE_DEADLINE_S)
            for number in list(self._actors):
                self._dismiss(number)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_DEADLINE_S)

    def _keep(self, number: int, first: Future[None]) -> None:
        while not self._closing.is_set():
            try:
                link = self._bring_up(number)
            except HostFailedError as error:
                self._set_down(number, str(error))
                if not first.done():
                    first.set_exception(error)
                    return
                self._closing.wait(_RETRY_S)
                continue
            self._set_up(number, link)
            if not first.done():
                first.set_result(None)
            self._lose(number, link, self._follow(link))
        if not first.done():
            first.set_exception(HostFailedError(_CLOSED))

    def _bring_up(self, number: int) -> HostLink:
        try:
            actor, name = self._place(number)
            gather({name: actor.start.remote()}, "start", _START_DEADLINE_S)
        except (RemoteError, ray.exceptions.RayError) as error:
            self._dismiss(number)
            raise HostFailedError(str(error)) from error
        return HostLink(name, actor)

    def _place(self, number: int) -> tuple[Any, str]:
        """The host's process, and its name with the node it runs on."""
        name = f"sandbox host {number}"
        while True:
            node = self._reserve(number)
            actor = self._spawn(number, node)
            try:
                calls = {name: actor.where.remote()}
                self._nodes[number], words = gather(calls, "placing", _PLACE_DEADLINE_S)[name]
            except RemoteError:
                if self._closing.is_set() or _is_alive(node):
                    raise
                self._dismiss(number)  # the node was gone before Ray knew: choose another
                continue
            return actor, f"{name} ({words})"

    def _reserve(self, number: int) -> str:
        """The node for a host; raises `HostFailedError` where none has room."""
        nodes, resource = ray.nodes(), self._resource
        with self._lock:
            self._nodes.pop(number, None)
            node = choose_node(nodes, resource, Counter(self._nodes.values()))
            if node is not None:
                self._nodes[number] = node
                return node
        offered: Counter[str] = Counter()
        for one in nodes:
            offered.update(one["Resources"] if one["Alive"] else {})
        others = sorted(key for key in offered if not key.startswith("node:"))
        raise HostFailedError(
            f"tool.python.hosts={self._config.hosts}: no node has room for sandbox host {number}; "
            f"expected {self._config.hosts} of {resource!r} in the cluster, which offers "
            f"{offered[resource]:g} of it and has {', '.join(others)}. Probable cause: nodes that "
            f"were started without --resources='{{\"{resource}\": ...}}', or that are gone"
        )

    def _spawn(self, number: int, node: str) -> Any:
        resource = self._resource
        actor = (
            ray.remote(num_cpus=0, max_concurrency=_MAX_CALLS)(SandboxHost)
            .options(
                resources={resource: 1} if resource else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            )
            .remote(self._config, str(self._log_folder / f"sandbox-host{number}.log"))
        )
        with self._lock:
            self._actors[number] = actor
        if self._closing.is_set():  # `close` may have missed it
            raise RemoteError(_CLOSED)
        return actor

    def _follow(self, link: HostLink) -> str:
        """Take the pulse until the host is lost; why it is."""
        died = f"{link.name} died; its log file under logs/ in the run folder says why"
        try:
            end = link.actor.until_ended.remote()
            while True:
                ping = link.actor.ping.remote()
                ready, _ = ray.wait([ping, end], timeout=self._silence_s)
                if not ready:  # or it was this process that slept
                    ready, _ = ray.wait([ping, end], timeout=_SECOND_LOOK_S)
                if not ready:
                    return f"{link.name} did not answer for {self._silence_s:g} s"
                if end in ready:
                    return died
                link.num_replaced = ray.get(ping)
                if link.is_cut or ray.wait([end], timeout=_PULSE_S)[0]:
                    return died
        except ray.exceptions.RayActorError:
            return died
        except ray.exceptions.RayError as error:
            return f"{link.name}: its pulse failed: {error}"

    def _set_up(self, number: int, link: HostLink) -> None:
        with self._lock:
            self._coming.discard(number)
            self._down.pop(number, None)
            if not self._closing.is_set():
                self._up[number] = link
        self._wake()

    def _set_down(self, number: int, why: str) -> None:
        with self._lock:
            self._coming.discard(number)
            is_news = self._down.get(number) != why
            self._down[number] = why
        if is_news:  # it is tried again every few seconds
            _logger.warning("%s", why)
        self._wake()

    def _lose(self, number: int, link: HostLink, why: str) -> None:
        with self._lock:
            self._up.pop(number, None)
            if self._closing.is_set():
                return
            self._coming.add(number)
            self._num_lost += self._config.workers + link.num_replaced
        _logger.warning("%s; it is replaced", why)
        link.cut(why)
        self._dismiss(number)

    def _dismiss(self, number: int) -> None:
        """End the process, whatever state it is in, and give its place back."""
        with self._lock:
            actor = self._actors.pop(number, None)
            self._nodes.pop(number, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _none_left(self) -> str:
        why = "; ".join(dict.fromkeys(self._down.values())) or "none came back in time"
        return f"no sandbox host is left of tool.python.hosts={self._config.hosts}: {why}"


def _is_alive(node: str) -> bool:
    return any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node)
