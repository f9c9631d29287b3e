"""A task with smolagents."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Sum of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


task = json.load(sys.stdin)
model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
answer = agent.run(task["prompt"][-1]["content"])
print(float(str(answer) == "3"))
