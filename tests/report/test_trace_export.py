"""Spans of a run in a file, at a collector, and nowhere."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.report.trace_export import open_tracer


def test_without_a_destination_there_is_no_tracer():
    with open_tracer("", "run") as tracer:
        assert tracer is None


def test_a_file_gets_a_line_for_each_span_and_is_appended_to(tmp_path):
    path = tmp_path / "deep" / "spans.jsonl"
    for name in ("one", "two"):
        with open_tracer(str(path), "smoke") as tracer:
            tracer.start_span(name, attributes={"tokens": 3}).end()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["one", "two"]
    assert lines[0]["attributes"] == {"tokens": 3}
    assert lines[0]["resource"]["attributes"]["run"] == "smoke"


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught, open_tracer(str(tmp_path), "run"):
        pytest.fail("opened")
    assert caught.value.key == "report.trace_destination"


@pytest.mark.parametrize(("given", "path"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/a", "/a")])
def test_a_collector_gets_spans_over_http(given, path):
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}{given}"
        with open_tracer(endpoint, "smoke") as tracer:
            tracer.start_span("one").end()
        server.shutdown()
        thread.join()
    ((where, request),) = got
    assert where == path
    assert [s.name for s in request.resource_spans[0].scope_spans[0].spans] == ["one"]
