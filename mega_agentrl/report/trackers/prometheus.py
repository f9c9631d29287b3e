"""A Prometheus endpoint on the driver: ``http://<driver>:<port>/metrics``.

Each metric is a gauge with the newest value, named ``mega_agentrl_<name>`` with a label for the
stage; what Prometheus does not take in a name becomes ``_`` (``rollout/reward_mean`` is
``mega_agentrl_rollout_reward_mean``). Beside them are counters of what the driver has done since
it started: ``mega_agentrl_steps_total`` by stage, ``mega_agentrl_tokens_total`` trained on, and
``mega_agentrl_tool_calls_total`` by tool. Values stay until the next ones come.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "mega_agentrl_"
TOKENS = ("update/num_tokens", "num_tokens")
"""Names of the tokens that a step was trained on, of RL and of the warm start."""

_TOOL_CALLS = re.compile(r"rollout/tool/(.+)/num_calls")
_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusTracker:
    """A `types.watch.Tracker`. Raises `ValueError` where the port cannot be had."""

    run_id = ""

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._steps = Counter(f"{PREFIX}steps", "Steps made.", ["stage"], registry=self._registry)
        self._tokens = Counter(f"{PREFIX}tokens", "Tokens trained on.", registry=self._registry)
        self._calls = Counter(
            f"{PREFIX}tool_calls", "Calls of tools in training.", ["tool"], registry=self._registry
        )
        try:
            self._server, self._thread = start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ValueError(
                f"report.prometheus_port={port}: cannot listen there ({error.strerror}); expected "
                "a free port above 1023; probable cause: another run or service on this machine "
                "has it"
            ) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def configure(self, settings: Mapping[str, object], text: str) -> None:
        """Nothing: settings are no numbers."""

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """See `types.watch.Tracker`."""
        self._steps.labels(stage).inc()
        for name, value in numbers.items():
            self._gauge(name).labels(stage).set(value)
            if name in TOKENS:
                self._tokens.inc(value)
            elif found := _TOOL_CALLS.fullmatch(name):
                self._calls.labels(found[1]).inc(value)
        self._gauge("step").labels(stage).set(step)

    def close(self) -> None:
        """See `types.watch.Tracker`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        """Names that differ only in what Prometheus does not take share a gauge."""
        valid = PREFIX + _FORBIDDEN.sub("_", name)
        if valid not in self._gauges:
            # The counters' own names would be refused.
            taken = valid.removesuffix("_total") in {
                f"{PREFIX}{one}" for one in ("steps", "tokens", "tool_calls")
            }
            shown = f"{valid}_now" if taken else valid
            self._gauges[valid] = Gauge(shown, name, ["stage"], registry=self._registry)
        return self._gauges[valid]
