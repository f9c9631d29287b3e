"""Asks the policy a question over HTTP, for sessions without a framework."""

import json
import os
import urllib.request


def ask(messages: list) -> str:
    """Send the messages, append the policy's answer and return its text."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "content-type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages.append(message)
    return message["content"] or ""
