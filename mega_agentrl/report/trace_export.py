"""Export spans to an OTLP collector over HTTP (Jaeger, Tempo, Phoenix, ...) or to a file.

A background thread exports spans in batches. If a collector is unavailable, spans are lost and the
driver's log says so, but no step fails. A file gets one JSON object per line in the SDK's format; a
resumed run appends to it.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

SERVICE_NAME = "mega_agentrl"
OTLP_TRACES_PATH = "/v1/traces"
"""Path on the collector for an endpoint without a path."""

MAX_QUEUED_SPANS = 65_536
"""Size of the export queue; a step creates many spans at once, surplus spans are lost."""


@contextmanager
def open_tracer(destination: str, run_name: str) -> Iterator[Tracer | None]:
    """Open the tracer of a run, or None without a destination; flushes spans on exit.

    Args:
        destination: value of `report.trace_destination`.
        run_name: attribute of all spans.

    Raises:
        ValueError: the file cannot be written.
    """
    if not destination:
        yield None
        return
    resource = Resource.create({"service.name": SERVICE_NAME, "run": run_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    with _exporter(destination) as exporter:
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))
        try:
            yield provider.get_tracer(SERVICE_NAME)
        finally:
            provider.shutdown()


@contextmanager
def _exporter(destination: str) -> Iterator[SpanExporter]:
    if destination.startswith(("http://", "https://")):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = (
            destination
            if urlsplit(destination).path.strip("/")
            else destination.rstrip("/") + OTLP_TRACES_PATH
        )
        yield OTLPSpanExporter(endpoint=endpoint)
        return
    path = Path(destination)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "report.trace_destination",
            destination,
            "a file, or an OTLP endpoint that begins with http:// or https://",
            f"a mistyped path: it cannot be written ({error.strerror})",
        ) from error
    with file:
        yield ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
