"""A tool in one function: `tool.user_tools_file=examples/my_tools.yaml`."""

from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.function import tool

METRES = {"m": 1.0, "km": 1000.0, "mile": 1609.344}


@tool(timeout_s=5, examples=[{"amount": 3, "unit": "km", "to": "mile"}])
def convert(amount: float, unit: str, to: str) -> str:
    """Converts a length.

    Args:
        amount: how much.
        unit: m, km or mile.
        to: m, km or mile.
    """
    for name in (unit, to):
        if name not in METRES:
            raise ToolInputError(f"unknown unit {name}, expected {', '.join(METRES)}")
    return f"{amount * METRES[unit] / METRES[to]:g} {to}"
