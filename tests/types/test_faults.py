"""A fault says which tool failed at what, as text and as a record."""

from mega_agentrl.types.faults import ToolFault
from mega_agentrl.types.records import ToolOutcome, ToolStatus


def test_a_fault_names_the_tool_and_carries_the_outcome():
    outcome = ToolOutcome(
        tool="notes", status=ToolStatus.infra_error, answer="create: no disk", latency_s=0.5
    )
    fault = ToolFault(outcome)
    assert isinstance(fault, RuntimeError), "the rollout takes it for a fault, not for a bug"
    assert str(fault) == "tool notes: create: no disk"
    assert fault.outcome is outcome
