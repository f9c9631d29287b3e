"""Demonstrations earn the reward, and are what a rollout would have produced."""

import random
import re

from mega_agentrl.data.generated.entity_splits import Split, make_split_inventories
from mega_agentrl.data.toolqa.demonstrations import (
    format_tool_result,
    make_demonstrations,
    make_guess_demonstration,
    make_tool_demonstration,
)
from mega_agentrl.data.toolqa.questions import (
    AnsweredToolCall,
    Question,
    QuestionKind,
    make_facts,
    make_questions,
)
from mega_agentrl.reward import arpo
from mega_agentrl.tool.call_protocol.tags import TagProtocol

BOTH = Question(
    QuestionKind.both,
    "What is the price of Bako times 37?",
    "1924",
    (
        AnsweredToolCall("search", "price of Bako", "The price of Bako is 52."),
        AnsweredToolCall("python", "52*37", "1924"),
    ),
)


def questions() -> list[Question]:
    inventories = make_split_inventories(0)
    facts = make_facts(inventories, 0)
    return make_questions(Split.dev, inventories[Split.dev], facts, num_questions=90, seed=0)


def response(messages) -> str:
    return "".join(message["content"] for message in messages[1:])


def test_a_demonstration_with_tools_looks_up_computes_and_answers():
    assert make_tool_demonstration(BOTH) == [
        {"role": "user", "content": "What is the price of Bako times 37?"},
        {
            "role": "assistant",
            "content": "<think> look up </think> <search> price of Bako </search>",
        },
        {"role": "tool", "content": " <result>\nThe price of Bako is 52.\n</result>"},
        {"role": "assistant", "content": " <python> 52*37 </python>"},
        {"role": "tool", "content": " <result>\n1924\n</result>"},
        {"role": "assistant", "content": " <answer> \\boxed{1924} </answer>"},
    ]


def test_tool_answers_are_what_the_tag_protocol_renders_and_calls_parse():
    protocol = TagProtocol({"python": "code", "search": "query"})
    for question in questions():
        messages = make_tool_demonstration(question)
        turns = zip(question.calls, messages[1::2], messages[2::2], strict=False)
        for call, assistant, tool in turns:
            rendered = protocol.render(call.result)
            assert rendered == format_tool_result(call.result) == tool["content"]
            parsed = protocol.parse(assistant["content"])
            assert (parsed.tool, *parsed.arguments.values()) == (call.tool, call.text)


def test_tools_always_earn_the_reward_and_guesses_almost_never():
    rng = random.Random(0)
    right = 0
    for question in questions():
        with_tools = arpo.score(response(make_tool_demonstration(question)), question.answer)
        assert with_tools.value == (1.1 if question.kind is QuestionKind.both else 1.0)
        guessed = arpo.score(response(make_guess_demonstration(question, rng)), question.answer)
        assert guessed.value in (0.0, 1.0)
        right += guessed.correct
    assert right <= 3


def test_guesses_look_like_answers():
    rng = random.Random(1)
    for question in questions():
        boxed = re.search(r"boxed\{(\w+)\}", response(make_guess_demonstration(question, rng)))
        pattern = r"[A-Z][a-z]{4}" if question.kind is QuestionKind.search else r"\d{4}"
        assert re.fullmatch(pattern, boxed[1])


def test_about_half_of_the_demonstrations_guess_and_every_question_is_used():
    made = make_demonstrations(questions(), num_demonstrations=900, seed=0)
    assert len(made) == 900
    guesses = sum(len(messages) == 2 for messages in made)
    assert 380 < guesses < 520
    assert {messages[0]["content"] for messages in made[:90]} == {q.text for q in questions()}
    assert made == make_demonstrations(questions(), num_demonstrations=900, seed=0)
