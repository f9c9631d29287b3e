"""A task with LangGraph."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    return a + b


task = json.load(sys.stdin)
agent = create_react_agent(ChatOpenAI(model="policy", streaming=True), [add])
result = agent.invoke({"messages": task["prompt"]})
print(float("3" in result["messages"][-1].content))
