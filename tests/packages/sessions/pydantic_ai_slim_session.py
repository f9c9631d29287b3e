"""A task with pydantic-ai."""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

task = json.load(sys.stdin)
agent = Agent(OpenAIChatModel("policy"))


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    return a + b


result = agent.run_sync(task["prompt"][-1]["content"])
print(float("3" in result.output))
