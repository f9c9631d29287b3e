"""Conversations with calls: a row for each answer that calls, in every published form."""

import json

import pytest

from mega_agentrl.data.converters.open_agentic import convert_agentic
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.errors import InputError
from mega_agentrl.reward.function_call import score

TOOLS = [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}]
CALL = '[{"name": "weather", "arguments": {"city": "Rome"}}]'


def openai():
    arguments = '{"city": "Rome"}'
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
        },
        {"role": "tool", "content": "Sunny."},
        {"role": "assistant", "content": "<think>easy</think>It is sunny."},
        {"role": "user", "content": "And Oslo?"},
        {
            "role": "assistant",
            "content": "<think>a <tool_call>{</tool_call>?</think>"
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
        },
    ]


def sharegpt():
    return [
        {"from": "human", "value": "Weather in Rome?"},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": "Sunny."},
        {"from": "gpt", "value": "It is sunny."},
    ]


def convert(*values):
    source = [SourceRow("o.jsonl", f"line {n}", value) for n, value in enumerate(values, 1)]
    return convert_agentic(source, "open_agentic_tool_use")


def test_every_answer_with_calls_is_a_row_with_what_went_before():
    first, second = convert({"messages": openai(), "tools": TOOLS}).rows
    assert [row["extra_info"]["index"] for row in (first, second)] == ["0/0", "0/1"]
    assert first["data_source"] == "open_agentic_tool_use"
    assert first["prompt"][0]["content"].endswith("Be brief.")
    assert first["prompt"][1:] == [{"role": "user", "content": "Weather in Rome?"}]
    assert second["prompt"][1:] == [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "Sunny."},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "And Oslo?"},
    ]
    truth = second["reward_model"]["ground_truth"]
    assert score("</think>[weather(city='Oslo')]", truth).value == 1.0
    assert score("</think>[weather(city='Rome')]", truth).value == 0.0


def test_messages_may_be_those_of_sharegpt_as_json_text():
    row = {"conversations": json.dumps(sharegpt()), "tools": json.dumps(TOOLS)}
    (made,) = convert(row).rows
    assert made["reward_model"]["ground_truth"] == CALL
    assert json.dumps(TOOLS[0]) in made["prompt"][0]["content"]


def test_conversations_without_calls_are_left_out_and_counted():
    talk = {"messages": [{"role": "user", "content": "Hi"}]}
    converted = convert({"messages": openai()}, talk)
    assert len(converted.rows) == 2
    assert dict(converted.notes) == {"left out: conversations without a call": 1}


def test_rows_of_the_xlam_shape_are_taken():
    (made,) = convert({"query": "Weather?", "tools": TOOLS, "answers": CALL}).rows
    assert made["data_source"] == "open_agentic_tool_use"
    assert made["reward_model"]["ground_truth"] == CALL


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "<tool_call>{</tool_call>"},
        {"role": "assistant", "content": "", "tool_calls": "[{"},
        {"from": "function_call", "value": "3"},
    ],
)
def test_a_bad_message_is_named(message):
    question = {"role": "user", "content": "?"}
    with pytest.raises(InputError) as caught:
        convert({"messages": [question, message]})
    assert caught.value.name == "o.jsonl line 1, field messages"
