"""Orders and demonstrations by hand, and played against the customer."""

from __future__ import annotations

import random

import pytest

from mega_agentrl.data.generated.entity_splits import Split, value_names
from mega_agentrl.data.orders.demonstrations import (
    GREETINGS,
    make_demonstration,
    make_demonstrations,
)
from mega_agentrl.data.orders.orders import (
    ATTRIBUTES,
    NUM_WANTED,
    Order,
    make_orders,
    parse_order,
    parse_question,
)
from mega_agentrl.rollout.interaction.customer import Customer

NAMES = ("Lalak", "Milok", "Nuruk", "Silak", "Tolik", "Vamuk")
ORDER = Order(
    customer=47,
    values=dict(zip(ATTRIBUTES, NAMES, strict=True)),
    wanted=("street", "brand"),
)


def make(split=Split.dev, num_orders=60):
    return make_orders(split, num_orders=num_orders, seed=0)


def texts(messages, role):
    return [message["content"] for message in messages if message["role"] == role]


def test_a_demonstration_asks_for_both_values_and_orders():
    messages = make_demonstration(ORDER, [False, False], random.Random(0))
    assert texts(messages, "user") == [
        "Customer 47 here.",
        "I need street and brand.",
        "street=Vamuk",
        "brand=Lalak",
    ]
    greeting, *rest = texts(messages, "assistant")
    assert greeting in GREETINGS
    assert rest == [
        "<think> first </think> ask street",
        "<think> second </think> ask brand",
        "<think> known </think> order street=Vamuk brand=Lalak",
    ]


def test_what_was_never_asked_is_guessed():
    for seed in range(20):
        messages = make_demonstration(ORDER, [True, True], random.Random(seed))
        asked = {parse_question(text) for text in texts(messages, "assistant")[1:3]}
        last = texts(messages, "assistant")[-1]
        assert (" known " in last) == (asked >= set(ORDER.wanted))
        for name, value in parse_order(last).items():
            assert value in value_names()
            assert (value == ORDER.values[name]) == (name in asked)


@pytest.mark.parametrize(
    ("text", "question", "order"),
    [
        ("<think> any </think> ask city", "city", None),
        ("ask price", None, None),
        ("ask city please", None, None),
        ("order city=Bako brand=Dumi", None, {"city": "Bako", "brand": "Dumi"}),
        ("order city=Bako brand", None, None),
        ("order", None, None),
    ],
)
def test_messages_are_read_to_their_end(text, question, order):
    assert (parse_question(text), parse_order(text)) == (question, order)


async def play(order, demonstration):
    """Play the assistant's messages of a demonstration; return the customer's and the reward."""
    customer = Customer()
    kwargs = {"values": dict(order.values), "wanted": list(order.wanted)}
    customer.check_kwargs(kwargs)
    state = await customer.create(kwargs)
    answers = []
    for text in texts(demonstration, "assistant"):
        reply = await customer.respond(state, [{"role": "assistant", "content": text}])
        answers += [] if reply.is_last else [reply.text]
    return answers, await customer.calc_reward(state)


async def test_the_customer_answers_as_in_the_demonstrations():
    rng = random.Random(3)
    rewards = {True: [], False: []}
    for order in make():
        for wanders in (True, False):
            demonstration = make_demonstration(order, [wanders] * NUM_WANTED, rng)
            answers, reward = await play(order, demonstration)
            assert answers == texts(demonstration, "user")[1:]
            rewards[wanders].append(reward)
    assert set(rewards[False]) == {1.0}
    # Two of six attributes in any order: 1/18 of the games.
    assert sum(rewards[True]) < 12


def test_half_of_the_questions_wander_and_every_order_is_used():
    made = make_demonstrations(make(), num_demonstrations=600, seed=0)
    assert len(made) == 600
    thoughts = [text for messages in made for text in texts(messages, "assistant")[1:-1]]
    assert 520 < sum(" any " in text for text in thoughts) < 680
    assert len({str(texts(messages, "user")[1:2]) for messages in made}) > 20
    assert made == make_demonstrations(make(), num_demonstrations=600, seed=0)


def test_splits_have_games_of_their_own():
    train, held_out = (
        {str(order.values) for order in make(split)} for split in (Split.train, Split.validation)
    )
    assert len(train) == len(held_out) == 60
    assert not train & held_out
    for order in make():
        assert set(order.values) == set(ATTRIBUTES)
        assert len(set(order.wanted)) == NUM_WANTED
