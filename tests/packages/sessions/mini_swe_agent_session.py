"""A task with mini-swe-agent in the sandbox of the command."""

import json
import os
import sys

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

task = json.load(sys.stdin)
model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors")
agent = DefaultAgent(
    model,
    LocalEnvironment(cwd="/tmp"),
    system_template="You work in a shell.",
    instance_template="{{ task }}",
)
result = agent.run(task["prompt"][-1]["content"])
print(float(result["submission"].strip() == "3"))
