r"""Demonstrations of tool-QA whose calls are messages of a chat, as the OpenAI API has them.

::

    user       What is the moon of Bako times 37?
    assistant  <think>
               look up
               </think>
               <tool_call>
               {"name": "search", "arguments": {"query": "moon of Bako"}}
               </tool_call>
    tool       The moon of Bako is 52.
    assistant  <tool_call>
               {"name": "python", "arguments": {"code": "52*37"}}
               </tool_call>
    tool       1924
    assistant  \boxed{1924}

The native loop (`rollout=hermes`) and an agent that gets the calls from the gateway see the same
tokens.
"""

from __future__ import annotations

import json

from mega_agentrl.data.generated.entity_splits import (
    ENTITY_PREFIXES,
    ENTITY_SUFFIXES,
    VALUE_PREFIXES,
    VALUE_SUFFIXES,
)
from mega_agentrl.data.generated.tokenizer import TaskVocabulary
from mega_agentrl.data.toolqa.questions import AnsweredToolCall, Question
from mega_agentrl.types.records import Message

BOXED_PREFIX = "\\boxed{"
THOUGHT_BY_TOOL = {"python": "compute", "search": "look up", None: "guess"}
PARAMETER_BY_TOOL = {"python": "code", "search": "query"}
CHAT_VOCABULARY = TaskVocabulary(
    tokens=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *(
            f'{{"name": "{tool}", "arguments": {{"{parameter}": "'
            for tool, parameter in PARAMETER_BY_TOOL.items()
        ),
        *('"}}', BOXED_PREFIX, "Tools:", "system", "python", "search"),
    ),
    spaced_syllables=ENTITY_PREFIXES,
    syllables=(*ENTITY_SUFFIXES, *VALUE_PREFIXES, *VALUE_SUFFIXES),
    tool_template="{{- tool.function.name }}",
)
SHOWN_TOOLS = json.dumps(
    [{"type": "function", "function": {"name": tool}} for tool in PARAMETER_BY_TOOL]
)
"""Column `tools` of demonstrations; the chat template of the task shows names only."""


def make_tool_chat(question: Question) -> list[Message]:
    """Return a conversation that calls the tools and gives the true answer."""
    messages: list[Message] = [{"role": "user", "content": question.text}]
    thought = f"<think>\n{THOUGHT_BY_TOOL[question.calls[0].tool]}\n</think>\n"
    for call in question.calls:
        messages.append({"role": "assistant", "content": f"{thought}{_format_call(call)}"})
        messages.append({"role": "tool", "content": call.result})
        thought = ""
    messages.append({"role": "assistant", "content": _format_answer(question.answer)})
    return messages


def format_chat_guess(answer: str) -> str:
    """Return the message of an assistant that guesses."""
    return f"<think>\n{THOUGHT_BY_TOOL[None]}\n</think>\n{_format_answer(answer)}"


def _format_call(call: AnsweredToolCall) -> str:
    arguments = {PARAMETER_BY_TOOL[call.tool]: call.text}
    body = json.dumps({"name": call.tool, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _format_answer(answer: str) -> str:
    return f"{BOXED_PREFIX}{answer}}}"
