"""Place, start, monitor and replace the sandbox hosts.

Each host has a thread that repeats: choose a node, start the process, start its sandboxes, ping it
until it dies or stays silent. `select_host` returns a running host. If none runs but one is being
replaced, it waits until the replacement is up or has failed, the timeout passes or the pool is
closed.

A host reserves no CPU in Ray. If the cluster has nodes reserved for hosts
(`SANDBOX_HOST_RESOURCE`), a host reserves 1 of that resource. This module chooses the nodes instead
of Ray, because Ray would not spread the hosts evenly and would wait for a missing node instead of
raising an error.
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

from mega_agentrl.runtime.remote_calls import (
    DEATH_ERRORS,
    POLL_INTERVAL_S,
    RemoteCallError,
    describe_death,
    gather,
)
from mega_agentrl.runtime.sandboxes.host_actor import SandboxHostActor
from mega_agentrl.runtime.sandboxes.host_client import HostClient
from mega_agentrl.sandbox.client import SandboxLostError
from mega_agentrl.types.liveness import LivenessTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mega_agentrl.config.sections.tools import PythonToolConfig

SANDBOX_HOST_RESOURCE = "sandbox_host"
"""Custom Ray resource of nodes reserved for sandbox hosts.

If any node has it, hosts run only on such nodes and each occupies 1 of it.
"""

_PLACE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 150.0
"""Timeout in seconds for the sandboxes of a host, longer than the timeout of one sandbox."""

_RETRY_INTERVAL_S = 10.0
_PING_INTERVAL_S = 2.0
_HOST_CLOSE_TIMEOUT_S = 10.0
_MAX_CONCURRENT_CALLS = 1_000_000
"""Maximum number of calls in one host, nearly all of which wait in its pool."""

_logger = logging.getLogger(__name__)
_CLOSED_MESSAGE = "the sandbox pool is closed"


def choose_node(
    nodes: Sequence[Mapping[str, Any]], resource: str, num_hosts: Mapping[str, int]
) -> str | None:
    """Return the id of the node with room that has the fewest hosts; None if no node has room.

    Args:
        nodes: Nodes as returned by `ray.nodes()`.
        resource: Custom resource that a host reserves 1 of; empty for none.
        num_hosts: Number of hosts by node id.
    """
    candidates = [
        str(node["NodeID"])
        for node in nodes
        if node["Alive"]
        and (
            not resource
            or node["Resources"].get(resource, 0) >= num_hosts.get(node["NodeID"], 0) + 1
        )
    ]
    return min(candidates, key=lambda node: (num_hosts.get(node, 0), node), default=None)


class HostStartError(RuntimeError):
    """A host could not be started; the message says which and why."""


class HostSupervisor:
    """Supervises `config.num_hosts` hosts; call `start` before the first `select_host`.

    A host that does not answer a ping for `host_timeout_s` is lost.
    """

    def __init__(
        self, config: PythonToolConfig, log_folder: Path, *, host_timeout_s: float
    ) -> None:
        self._config = config
        self._log_folder = log_folder
        self._timeout_s = host_timeout_s
        self._resource = ""
        self._lock = threading.Lock()
        self._stop_event = threading.Event()
        self._threads: list[threading.Thread] = []
        self._node_ids: dict[int, str] = {}  # where each host is or will be
        self._actors: dict[int, Any] = {}
        self._clients: dict[int, HostClient] = {}
        self._starting: set[int] = set()
        self._failure_reasons: dict[int, str] = {}  # of hosts that are down
        self._waiters: list[Future[None]] = []
        self._num_lost_sandboxes = 0

    @property
    def num_replaced(self) -> int:
        """Number of sandboxes lost so far, including all sandboxes of lost hosts."""
        with self._lock:
            return self._num_lost_sandboxes + sum(
                client.num_replaced for client in self._clients.values()
            )

    def start(self) -> None:
        """Start all hosts and wait until they are up.

        Raises:
            HostStartError: A host could not be started.
        """
        # Decided once, so that a host whose node is gone waits for another reserved node.
        has_reserved_nodes = any(
            SANDBOX_HOST_RESOURCE in node["Resources"] for node in ray.nodes() if node["Alive"]
        )
        self._resource = SANDBOX_HOST_RESOURCE if has_reserved_nodes else ""
        numbers = range(self._config.num_hosts)
        first_starts: list[Future[None]] = [Future() for _ in numbers]
        self._threads = [
            threading.Thread(
                target=self._run_host,
                args=(number, first_start),
                name=f"sandbox-host-{number}",
                daemon=True,
            )
            for number, first_start in zip(numbers, first_starts, strict=True)
        ]
        self._starting = set(numbers)
        for thread in self._threads:
            thread.start()
        for first_start in as_completed(first_starts):
            first_start.result()

    async def select_host(self) -> HostClient:
        """Return the host with the lowest load; wait for a replacement if none is up.

        Raises:
            SandboxLostError: No host is up and none is being replaced.
        """
        ends_at = time.monotonic() + _START_TIMEOUT_S
        while True:
            with self._lock:
                if self._stop_event.is_set():
                    raise SandboxLostError(_CLOSED_MESSAGE, may_have_run=False)
                if running := [client for client in self._clients.values() if not client.is_lost]:
                    return min(running, key=lambda client: client.load)
                if not (self._clients or self._starting) or time.monotonic() > ends_at:
                    raise SandboxLostError(self._no_host_message(), may_have_run=False)
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            try:
                async with asyncio.timeout(ends_at - time.monotonic()):
                    await asyncio.wrap_future(waiter)
            except TimeoutError:
                continue

    def close(self) -> None:
        """Close every host and fail running and waiting calls. Blocks; safe to call twice."""
        with self._lock:
            self._stop_event.set()
            clients, actors = list(self._clients.values()), list(self._actors.values())
            self._clients.clear()
        self._notify_waiters()
        for client in clients:
            client.mark_lost(_CLOSED_MESSAGE)
        if actors and ray.is_initialized():
            # A host that closes cleanly removes its control groups and releases its users.
            close_calls = [actor.close.remote() for actor in actors]
            ray.wait(close_calls, num_returns=len(close_calls), timeout=_HOST_CLOSE_TIMEOUT_S)
            for number in list(self._actors):
                self._kill_host(number)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_HOST_CLOSE_TIMEOUT_S)

    def _run_host(self, number: int, first_start: Future[None]) -> None:
        while not self._stop_event.is_set():
            try:
                client = self._start_host(number)
            except HostStartError as error:
                self._mark_down(number, str(error))
                if not first_start.done():
                    first_start.set_exception(error)
                    return
                self._stop_event.wait(_RETRY_INTERVAL_S)
                continue
            self._mark_up(number, client)
            if not first_start.done():
                first_start.set_result(None)
            self._handle_loss(number, client, self._monitor_host(client))
        if not first_start.done():
            first_start.set_exception(HostStartError(_CLOSED_MESSAGE))

    def _start_host(self, number: int) -> HostClient:
        try:
            actor, name = self._place_host(number)
            gather({name: actor.start.remote()}, "start", _START_TIMEOUT_S)
        except (RemoteCallError, ray.exceptions.RayError) as error:
            self._kill_host(number)
            raise HostStartError(str(error)) from error
        return HostClient(name, actor)

    def _place_host(self, number: int) -> tuple[Any, str]:
        """Create the host's actor; return it and its name with the node that it runs on."""
        name = f"sandbox host {number}"
        while True:
            node = self._reserve_node(number)
            actor = self._spawn_actor(number, node)
            try:
                calls = {name: actor.location.remote()}
                self._node_ids[number], description = gather(calls, "placing", _PLACE_TIMEOUT_S)[
                    name
                ]
            except RemoteCallError:
                if self._stop_event.is_set() or _is_node_alive(node):
                    raise
                self._kill_host(number)  # the node was gone before Ray knew: choose another
                continue
            return actor, f"{name} ({description})"

    def _reserve_node(self, number: int) -> str:
        """Choose the node for a host.

        Raises:
            HostStartError: No node has room.
        """
        nodes, resource = ray.nodes(), self._resource
        with self._lock:
            self._node_ids.pop(number, None)
            node = choose_node(nodes, resource, Counter(self._node_ids.values()))
            if node is not None:
                self._node_ids[number] = node
                return node
        resources: Counter[str] = Counter()
        for node_info in nodes:
            resources.update(node_info["Resources"] if node_info["Alive"] else {})
        names = sorted(key for key in resources if not key.startswith("node:"))
        raise HostStartError(
            f"no node has room for sandbox host {number}; expected {self._config.num_hosts} of "
            f"{resource!r} in the cluster, which has {resources[resource]:g} of it and offers "
            f"{', '.join(names)}. Probable cause: "
            f"nodes that were started without --resources='{{\"{resource}\": ...}}', or "
            "lost nodes"
        )

    def _spawn_actor(self, number: int, node: str) -> Any:
        resource = self._resource
        actor = (
            ray.remote(num_cpus=0, max_concurrency=_MAX_CONCURRENT_CALLS)(SandboxHostActor)
            .options(
                resources={resource: 1} if resource else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            )
            .remote(self._config, str(self._log_folder / f"sandbox-host{number}.log"))
        )
        with self._lock:
            self._actors[number] = actor
        if self._stop_event.is_set():  # `close` may have missed it
            raise RemoteCallError(_CLOSED_MESSAGE)
        return actor

    def _monitor_host(self, client: HostClient) -> str:
        """Ping the host until it is lost; return the reason."""
        liveness = LivenessTracker[str]()
        try:
            death = client.actor.wait_for_death.remote()
            while True:
                ping = client.actor.ping.remote()
                liveness.begin_round()
                liveness.record_heartbeat(client.name)  # silence begins with the ping
                while not (ready := ray.wait([ping, death], timeout=POLL_INTERVAL_S)[0]):
                    liveness.begin_round()
                    if liveness.seconds_since_heartbeat(client.name) > self._timeout_s:
                        return f"{client.name} did not answer for {self._timeout_s:g} s"
                if death not in ready:
                    client.num_replaced = ray.get(ping)
                    ready = ray.wait([death], timeout=0 if client.is_lost else _PING_INTERVAL_S)[0]
                if death in ready or client.is_lost:
                    ray.get(death, timeout=_PING_INTERVAL_S)  # raises
        except DEATH_ERRORS as error:
            return describe_death(client.name, error)
        except ray.exceptions.RayError as error:
            return f"{client.name}: its ping failed: {error}"

    def _mark_up(self, number: int, client: HostClient) -> None:
        with self._lock:
            self._starting.discard(number)
            self._failure_reasons.pop(number, None)
            if not self._stop_event.is_set():
                self._clients[number] = client
        self._notify_waiters()

    def _mark_down(self, number: int, reason: str) -> None:
        with self._lock:
            self._starting.discard(number)
            is_new_reason = self._failure_reasons.get(number) != reason
            self._failure_reasons[number] = reason
        if is_new_reason:  # the start is retried every few seconds
            _logger.warning("%s", reason)
        self._notify_waiters()

    def _handle_loss(self, number: int, client: HostClient, reason: str) -> None:
        with self._lock:
            self._clients.pop(number, None)
            if self._stop_event.is_set():
                return
            self._starting.add(number)
            self._num_lost_sandboxes += self._config.num_workers + client.num_replaced
        _logger.warning("%s; it is replaced", reason)
        client.mark_lost(reason)
        self._kill_host(number)

    def _kill_host(self, number: int) -> None:
        """Kill the process, whatever its state, and release its node."""
        with self._lock:
            actor = self._actors.pop(number, None)
            self._node_ids.pop(number, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def _notify_waiters(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _no_host_message(self) -> str:
        reason = (
            "; ".join(dict.fromkeys(self._failure_reasons.values())) or "none was restarted in time"
        )
        return (
            f"no sandbox host is left of tool.python.num_hosts={self._config.num_hosts}: {reason}"
        )


def _is_node_alive(node: str) -> bool:
    return any(info["Alive"] for info in ray.nodes() if info["NodeID"] == node)
