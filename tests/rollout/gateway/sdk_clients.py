"""One interface over the real SDKs of the three APIs, for tests that hold for all of them.

A history is a list of what a client of that SDK sends: dictionaries, and the SDK's own objects for
answers. `to_wire` gives it as the JSON that arrives at the server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import anthropic
import openai

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
DESCRIPTION = "Sum of two numbers."


@dataclass(kw_only=True)
class Reply:
    """An answer as a client reads it."""

    items: list[Any]
    """What a client appends to its history."""
    text: str
    reasoning: str
    calls: list[tuple[str, str, dict[str, Any]]]
    """Id, name and arguments."""
    finish: str
    num_prompt_tokens: int
    num_answer_tokens: int


def to_wire(value: Any) -> Any:
    """Objects of an SDK as the JSON that the SDK sends."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: to_wire(item) for key, item in value.items()}
    return [to_wire(item) for item in value] if isinstance(value, list) else value


def error_text(error: Any) -> str:
    """Message and code of an exception of an SDK."""
    return f"{error} code: {getattr(error, 'code', None)}"


def _other_json(text: str) -> str:
    """The same JSON with other spaces and escapes, keys in reverse order and integers as floats."""
    value = json.loads(text, parse_int=float)
    return json.dumps(dict(reversed(value.items())), indent=1)


class ChatClient:
    """OpenAI's chat completions."""

    errors = openai
    path = "/v1/chat/completions"
    too_long = "code: context_length_exceeded"
    length = "length"
    tool_calls = "tool_calls"
    tool: ClassVar = {
        "type": "function",
        "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS},
    }
    settings: ClassVar = {"temperature": 0.1, "top_p": 0.5}
    zeros: ClassVar = {"temperature": 0, "top_p": 0, "seed": 0}
    no_calls: ClassVar = "none"

    def __init__(self, url: str, key: str, **options: Any) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)

    async def ask(self, history: list[Any], **options: Any) -> Reply:
        options = {"tools": [self.tool], **options}
        completion = await self.client.chat.completions.create(
            model="m", messages=history, **options
        )
        return self._reply(completion)

    async def stream(self, history: list[Any]) -> Reply:
        stream = self.client.chat.completions.stream(
            model="m",
            messages=history,
            tools=[self.tool],
            stream_options={"include_usage": True},
        )
        async with stream as events:
            return self._reply(await events.get_final_completion())

    async def warning(self, history: list[Any], **settings: Any) -> str:
        create = self.client.chat.completions.with_raw_response.create
        raw = await create(model="m", messages=history, **settings)
        return raw.headers["x-gateway-warning"]

    def tool_results(self, reply: Reply, results: list[str]) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": call[0], "content": text}
            for call, text in zip(reply.calls, results, strict=True)
        ]

    @staticmethod
    def without_reasoning(item: Any) -> list[Any]:
        return [{key: value for key, value in item.items() if key != "reasoning_content"}]

    @staticmethod
    def with_other_json(item: Any) -> list[Any]:
        for call in item.get("tool_calls") or ():
            call["function"]["arguments"] = _other_json(call["function"]["arguments"])
        return [item]

    @staticmethod
    def with_parts(item: Any) -> list[Any]:
        text = item["content"] or ""
        return [{**item, "content": [{"type": "text", "text": text}]}]

    @staticmethod
    def with_strings(item: Any) -> list[Any]:
        return [{**item, "content": item["content"] or ""}]

    @staticmethod
    def with_other_ids(item: Any) -> list[Any]:
        for call in item.get("tool_calls") or ():
            call["id"] = f"other-{call['id']}"
        if "tool_call_id" in item:
            item["tool_call_id"] = f"other-{item['tool_call_id']}"
        return [item]

    def _reply(self, completion: Any) -> Reply:
        choice = completion.choices[0]
        message = choice.message
        return Reply(
            items=[message],
            text=message.content or "",
            reasoning=getattr(message, "reasoning_content", ""),
            calls=[
                (call.id, call.function.name, json.loads(call.function.arguments))
                for call in message.tool_calls or ()
            ],
            finish=choice.finish_reason,
            num_prompt_tokens=completion.usage.prompt_tokens,
            num_answer_tokens=completion.usage.completion_tokens,
        )


class ResponsesClient:
    """OpenAI's responses."""

    errors = openai
    path = "/v1/responses"
    too_long = "code: context_length_exceeded"
    length = "incomplete"
    tool_calls = "completed"
    tool: ClassVar = {
        "type": "function",
        "name": "add",
        "description": DESCRIPTION,
        "parameters": PARAMETERS,
        "strict": False,
    }
    settings: ClassVar = {"temperature": 0.1, "top_p": 0.5}
    zeros: ClassVar = {"temperature": 0, "top_p": 0, "top_logprobs": 0}
    no_calls: ClassVar = "none"

    def __init__(self, url: str, key: str, **options: Any) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)

    async def ask(self, history: list[Any], **options: Any) -> Reply:
        options = {"tools": [self.tool], **options}
        response = await self.client.responses.create(model="m", input=history, **options)
        return self._reply(response)

    async def stream(self, history: list[Any]) -> Reply:
        stream = self.client.responses.stream(model="m", input=history, tools=[self.tool])
        async with stream as events:
            return self._reply(await events.get_final_response())

    async def warning(self, history: list[Any], **settings: Any) -> str:
        create = self.client.responses.with_raw_response.create
        raw = await create(model="m", input=history, **settings)
        return raw.headers["x-gateway-warning"]

    def tool_results(self, reply: Reply, results: list[str]) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call[0], "output": text}
            for call, text in zip(reply.calls, results, strict=True)
        ]

    @staticmethod
    def without_reasoning(item: Any) -> list[Any]:
        return [] if item.get("type") == "reasoning" else [item]

    @staticmethod
    def with_other_json(item: Any) -> list[Any]:
        if item.get("type") == "function_call":
            item["arguments"] = _other_json(item["arguments"])
        return [item]

    @staticmethod
    def with_parts(item: Any) -> list[Any]:
        for key in ("content", "output"):
            if isinstance(item.get(key), str):
                item[key] = [{"type": "input_text", "text": item[key]}]
        return [item]

    @staticmethod
    def with_strings(item: Any) -> list[Any]:
        if item.get("type") == "message":
            return [{"role": item["role"], "content": item["content"][0]["text"]}]
        return [item]

    @staticmethod
    def with_other_ids(item: Any) -> list[Any]:
        return [{**item, **{key: f"x{item[key]}" for key in ("id", "call_id") if key in item}}]

    def _reply(self, response: Any) -> Reply:
        items = response.output
        reasoning = [item for item in items if item.type == "reasoning"]
        return Reply(
            items=list(items),
            text=response.output_text,
            reasoning="".join(part.text for item in reasoning for part in item.content),
            calls=[
                (item.call_id, item.name, json.loads(item.arguments))
                for item in items
                if item.type == "function_call"
            ],
            finish=response.status,
            num_prompt_tokens=response.usage.input_tokens,
            num_answer_tokens=response.usage.output_tokens,
        )


class AnthropicClient:
    """Anthropic's messages."""

    errors = anthropic
    path = "/v1/messages"
    too_long = "prompt is too long"
    length = "max_tokens"
    tool_calls = "tool_use"
    tool: ClassVar = {"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}
    settings: ClassVar = {"extra_body": {"temperature": 0.1, "top_p": 0.5}}
    zeros: ClassVar = {"extra_body": {"temperature": 0, "top_p": 0, "top_k": 0}}
    no_calls: ClassVar = {"type": "none"}

    def __init__(self, url: str, key: str, **options: Any) -> None:
        self.client = anthropic.AsyncAnthropic(base_url=url, api_key=key, **options)

    async def ask(self, history: list[Any], **options: Any) -> Reply:
        options = {"tools": [self.tool], **options}
        message = await self.client.messages.create(
            model="m", max_tokens=1000, messages=history, **options
        )
        return self._reply(message)

    async def stream(self, history: list[Any]) -> Reply:
        stream = self.client.messages.stream(
            model="m", max_tokens=1000, messages=history, tools=[self.tool]
        )
        async with stream as events:
            return self._reply(await events.get_final_message())

    async def warning(self, history: list[Any], **settings: Any) -> str:
        create = self.client.messages.with_raw_response.create
        raw = await create(model="m", max_tokens=1000, messages=history, **settings)
        return raw.headers["x-gateway-warning"]

    def tool_results(self, reply: Reply, results: list[str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call[0], "content": text}
            for call, text in zip(reply.calls, results, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    @staticmethod
    def without_reasoning(item: Any) -> list[Any]:
        if isinstance(item["content"], list):
            item["content"] = [part for part in item["content"] if part["type"] != "thinking"]
        return [item]

    @staticmethod
    def with_other_json(item: Any) -> list[Any]:
        for part in item["content"]:
            if "input" in part:
                part["input"] = json.loads(_other_json(json.dumps(part["input"])))
        return [item]

    @staticmethod
    def with_parts(item: Any) -> list[Any]:
        if isinstance(item["content"], str):
            item["content"] = [{"type": "text", "text": item["content"]}]
        for part in item["content"]:
            if isinstance(part.get("content"), str):
                cached = {"cache_control": {"type": "ephemeral"}}
                part["content"] = [{"type": "text", "text": part["content"], **cached}]
        return [item]

    @staticmethod
    def with_strings(item: Any) -> list[Any]:
        parts = item["content"]
        if isinstance(parts, list) and all(part["type"] in ("text", "thinking") for part in parts):
            item["content"] = "".join(part.get("text", "") for part in parts)
        return [item]

    @staticmethod
    def with_other_ids(item: Any) -> list[Any]:
        for part in item["content"]:
            for key in ("id", "tool_use_id"):
                if key in part:
                    part[key] = f"toolu_{part[key]}"
        return [item]

    def _reply(self, message: Any) -> Reply:
        blocks = message.content
        usage = message.usage
        return Reply(
            items=[{"role": message.role, "content": blocks}],
            text="".join(block.text for block in blocks if block.type == "text"),
            reasoning="".join(block.thinking for block in blocks if block.type == "thinking"),
            calls=[
                (block.id, block.name, block.input) for block in blocks if block.type == "tool_use"
            ],
            finish=message.stop_reason,
            num_prompt_tokens=usage.input_tokens + usage.cache_read_input_tokens,
            num_answer_tokens=usage.output_tokens,
        )


CLIENTS = {"chat": ChatClient, "responses": ResponsesClient, "anthropic": AnthropicClient}
