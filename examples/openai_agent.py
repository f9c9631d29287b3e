"""An agent of twenty lines with the OpenAI SDK, trained by `experiment=smoke_openai`.

It asks the policy, runs the tools that the policy calls, and stops at the first message without a
call. The tools are the run's own, which the gateway offers; an agent may as well bring its own.
"""

import json

from openai import AsyncOpenAI

MAX_TURNS = 6
_CLIENTS: dict[str, AsyncOpenAI] = {}


async def run(prompt: list[dict[str, object]], base_url: str, api_key: str) -> None:
    """Answer one prompt; the reward is left to the rubric."""
    shared = _CLIENTS.setdefault(base_url, AsyncOpenAI(base_url=base_url, api_key="none"))
    client = shared.with_options(api_key=api_key)
    tools = await client.get("/tools", cast_to=object)
    messages = list(prompt)
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=tools
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            result = await client.post(f"/tools/{call.function.name}", body=arguments, cast_to=dict)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result["answer"]})
        if not message.tool_calls:
            return
