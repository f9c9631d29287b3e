"""A Prometheus endpoint on the driver: ``http://<host>:<port>/metrics``.

The endpoint has no password, so by default it listens on the loopback address, where only processes
of the same machine reach it.

Each metric is a gauge with the latest value, named ``mega_agentrl_<name>`` with a label for the
stage; invalid characters become ``_`` (``rollout/reward_mean`` is
``mega_agentrl_rollout_reward_mean``). Counters since the start of the driver are
``mega_agentrl_steps_total`` by stage, ``mega_agentrl_tokens_total`` (tokens trained on) and
``mega_agentrl_tool_calls_total`` by tool. New metrics beyond `MAX_GAUGES` are left out and counted
in ``mega_agentrl_metrics_left_out``, because a server keeps each name for weeks.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

METRIC_PREFIX = "mega_agentrl_"
MAX_GAUGES = 2048
"""Metrics of a run: several times those of a run with 64 tools."""
MAX_TOOLS = 256
"""Labels of the counter of tool calls; calls of further tools are counted as `other`."""
TOKEN_METRICS = ("actor/num_tokens", "num_tokens")
"""Metrics with the number of trained tokens, of RL and of the warm start."""

_TOOL_CALLS_PATTERN = re.compile(r"rollout/tool/(.+)/num_calls")
_INVALID_LABEL_CHARS = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusTracker:
    """Serves the latest metrics over HTTP.

    Args:
        host: address to listen on; 0.0.0.0 and :: listen on all interfaces.
        port: TCP port; 0 lets the system choose.

    Raises:
        ValueError: the address cannot be bound.
    """

    run_id = ""

    def __init__(self, host: str, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._tools: set[str] = set()
        self._left_out = Gauge(
            f"{METRIC_PREFIX}metrics_left_out",
            f"Metrics of the last step beyond {MAX_GAUGES}.",
            ["stage"],
            registry=self._registry,
        )
        self._steps = Counter(
            f"{METRIC_PREFIX}steps", "Finished steps.", ["stage"], registry=self._registry
        )
        self._tokens = Counter(
            f"{METRIC_PREFIX}tokens", "Tokens trained on.", registry=self._registry
        )
        self._calls = Counter(
            f"{METRIC_PREFIX}tool_calls",
            "Tool calls in training.",
            ["tool"],
            registry=self._registry,
        )
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise _listen_error(host, port, error) from error

    @property
    def host(self) -> str:
        """Address of the endpoint."""
        return str(self._server.server_address[0])

    @property
    def port(self) -> int:
        """Port of the endpoint."""
        return int(self._server.server_port)

    def log_config(self, settings: Mapping[str, object], text: str) -> None:
        """Do nothing: settings are not metrics."""

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Update the gauges and counters."""
        self._steps.labels(stage).inc()
        num_left_out = 0
        for name, value in {"step": step, **numbers}.items():
            gauge = self._gauge(name)
            if gauge is None:
                num_left_out += 1
            else:
                gauge.labels(stage).set(value)
            if name in TOKEN_METRICS:
                self._tokens.inc(value)
            elif match := _TOOL_CALLS_PATTERN.fullmatch(name):
                self._calls.labels(self._tool_label(match[1])).inc(value)
        if num_left_out:
            self._left_out.labels(stage).set(num_left_out)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _tool_label(self, tool: str) -> str:
        if tool not in self._tools and len(self._tools) >= MAX_TOOLS:
            return "other"
        self._tools.add(tool)
        return tool

    def _gauge(self, name: str) -> Gauge | None:
        """Return the gauge of a metric, None if there are too many.

        Names that differ only in invalid characters share one.
        """
        valid = METRIC_PREFIX + _INVALID_LABEL_CHARS.sub("_", name)
        if valid not in self._gauges:
            if len(self._gauges) >= MAX_GAUGES:
                return None
            # Prometheus rejects names of existing counters.
            is_counter = valid.removesuffix("_total") in {
                f"{METRIC_PREFIX}{counter}" for counter in ("steps", "tokens", "tool_calls")
            }
            gauge_name = f"{valid}_now" if is_counter else valid
            self._gauges[valid] = Gauge(gauge_name, name, ["stage"], registry=self._registry)
        return self._gauges[valid]


def _listen_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        cause = f"another run or service on this machine uses it ({error.strerror})"
        return ConfigError("report.prometheus_port", port, "a free port above 1023", cause)
    expected = "an address of the driver's machine, or 0.0.0.0 for all of them"
    cause = f"the address of another machine ({error.strerror})"
    return ConfigError("report.prometheus_host", host, expected, cause)
