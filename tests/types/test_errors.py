"""A tool session error names the tool and carries the typed outcome."""

from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolOutcome, ToolStatus


def test_the_error_names_the_tool_and_carries_the_outcome():
    outcome = ToolOutcome(
        tool="notes", status=ToolStatus.infra_error, answer="create: no disk", latency_s=0.5
    )
    error = ToolSessionError(outcome)
    assert isinstance(error, RuntimeError)
    assert str(error) == "tool notes: create: no disk"
    assert error.outcome is outcome
