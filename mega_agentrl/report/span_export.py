"""Where spans go: an OTLP collector over HTTP (Jaeger, Tempo, Phoenix, ...), or a file.

Spans leave in batches from a thread of their own. A collector that is away costs spans, which the
driver's log says, and never a step. A file gets one JSON object a line, of the SDK's own form; a
run that goes on appends to it.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

SERVICE = "mega_agentrl"
TRACES_PATH = "/v1/traces"
"""Where a collector takes spans, for an endpoint without a path."""

QUEUE_SPANS = 65_536
"""Spans that wait to leave; a step makes many at once, and what is more is lost."""


@contextmanager
def open_tracer(where: str, run_name: str) -> Iterator[Tracer | None]:
    """The tracer of a run, None for an empty `where`; sends what is left on the way out.

    where: see `report.spans`. run_name: an attribute of all spans. Raises `ValueError` for a file
    that cannot be written.
    """
    if not where:
        yield None
        return
    resource = Resource.create({"service.name": SERVICE, "run": run_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    with _exporter(where) as exporter:
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS))
        try:
            yield provider.get_tracer(SERVICE)
        finally:
            provider.shutdown()


@contextmanager
def _exporter(where: str) -> Iterator[SpanExporter]:
    if where.startswith(("http://", "https://")):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = where if urlsplit(where).path.strip("/") else where.rstrip("/") + TRACES_PATH
        yield OTLPSpanExporter(endpoint=endpoint)
        return
    path = Path(where)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"report.spans={where}: cannot be written ({error.strerror}); expected a file, or an "
            "OTLP endpoint that begins with http:// or https://; probable cause: a mistyped path"
        ) from error
    with file:
        yield ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
