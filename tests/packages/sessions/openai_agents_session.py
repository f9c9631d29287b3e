"""A task with the OpenAI Agents SDK."""

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    return a + b


task = json.load(sys.stdin)
agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model="policy")
result = Runner.run_sync(agent, task["prompt"])
print(float("3" in str(result.final_output)))
