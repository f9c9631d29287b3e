"""A task with Qwen-Agent, which describes the tools in its prompt and reads the calls itself."""

import json
import os
import sys

from qwen_agent.agents import FnCallAgent
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Add(BaseTool):
    """Adds."""

    description = "Sum of two numbers."
    parameters = {  # noqa: RUF012  as Qwen-Agent wants it
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }

    def call(self, params: str, **kwargs: object) -> str:
        """Return the sum."""
        values = json.loads(params)
        return str(values["a"] + values["b"])


task = json.load(sys.stdin)
llm = {
    "model": "policy",
    "model_type": "oai",
    "model_server": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
}
agent = FnCallAgent(function_list=["add"], llm=llm)
*_, messages = agent.run(task["prompt"])
results = [message["content"] for message in messages if message["role"] == "function"]
print(float(results == ["3"] and "3" in messages[-1]["content"]))
