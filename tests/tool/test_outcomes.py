"""Counts and latencies by tool."""

from mega_agentrl.tool.outcomes import OutcomeCounter
from mega_agentrl.types.records import ToolOutcome, ToolStatus


def test_counts_and_latency():
    counter = OutcomeCounter()
    assert counter.metrics() == {}
    for status, latency_s in (
        (ToolStatus.ok, 1.0),
        (ToolStatus.ok, 3.0),
        (ToolStatus.timeout, 5.0),
    ):
        counter.add(ToolOutcome(tool="a", status=status, answer="", latency_s=latency_s))
    counter.add(ToolOutcome(tool="b", status=ToolStatus.ok, answer="", latency_s=0.5))
    values = counter.metrics()
    assert values["tool/a/num_calls"] == 3
    assert values["tool/a/num_ok"] == 2
    assert values["tool/a/num_timeout"] == 1
    assert values["tool/a/num_infra_error"] == 0
    assert values["tool/a/latency_mean_s"] == 3.0
    assert values["tool/a/latency_max_s"] == 5.0
    assert values["tool/b/num_calls"] == 1
