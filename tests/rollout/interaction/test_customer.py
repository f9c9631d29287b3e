"""The customer names what is wanted, answers questions, and judges the order."""

from __future__ import annotations

import pytest

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.orders.orders import ATTRIBUTES
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.interaction.customer import Customer
from mega_agentrl.rollout.interaction.session import InteractionRegistry
from mega_agentrl.types.records import StopReason
from tests.chat_models import save_tokenizer
from tests.rollout.chat_run import converse, make_kit, prompt_for

VALUES = {name: name.title() for name in ATTRIBUTES}
KWARGS = {"values": VALUES, "wanted": ["city", "brand"]}
RIGHT = "order city=City brand=Brand"


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return HFCodec(save_tokenizer("llama3", tmp_path_factory.mktemp("llama3")))


@pytest.mark.parametrize(
    ("turns", "reason", "reward"),
    [
        (["Hi", "ask city", "ask brand", RIGHT], StopReason.interaction_end, 1.0),
        (["Hi", "ask brand", "ask city", RIGHT], StopReason.interaction_end, 1.0),
        (["Hi", RIGHT], StopReason.interaction_end, 1.0),
        (["Hi", "ask city", "ask shop", "order city=City brand=Shop"], None, 0.0),
        (["Hi", "ask city", "order city=City"], StopReason.interaction_end, 0.0),
        (["Hi", f"{RIGHT} shop=Shop"], StopReason.interaction_end, 0.0),
        (["Hi", "Well?"], StopReason.interaction_end, 0.0),
        (["Hi", "ask city", "ask shop", "ask brand"], StopReason.interaction_limit, 0.0),
    ],
    ids=["right", "other order", "lucky", "guess", "half", "too much", "neither", "patience"],
)
async def test_a_game_ends_with_its_reward(codec, turns, reason, reward):
    kit = make_kit(codec)
    got, _ = await converse(
        codec,
        turns,
        kit=kit,
        prompt=prompt_for(codec, kit, extra_info={"interaction_kwargs": KWARGS}),
        interactions=InteractionRegistry([Customer()]),
    )
    assert got.stop_reason is (reason or StopReason.interaction_end)
    assert got.tool_rewards == {"customer": reward}
    assert "I need city and brand." in got.response_text
    assert ("city=City" in got.response_text) or turns[1] == "Well?"


async def test_a_fork_has_its_own_game():
    customer = Customer()
    state = await customer.create(KWARGS)
    await customer.respond(state, [{"role": "assistant", "content": "Hi"}])
    fork = await customer.fork(state)
    await customer.respond(fork, [{"role": "assistant", "content": RIGHT}])
    assert (await customer.calc_reward(state), await customer.calc_reward(fork)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"wanted": ["city"]}, "values"),
        ({"values": {"city": "Bako"}, "wanted": ["city"]}, "values"),
        ({"values": VALUES, "wanted": []}, "wanted"),
        ({"values": VALUES, "wanted": ["price"]}, "wanted"),
    ],
    ids=["no values", "few values", "nothing wanted", "unknown"],
)
def test_kwargs_that_are_no_order_are_refused(kwargs, key):
    with pytest.raises(InputError) as caught:
        Customer().check_kwargs(kwargs)
    assert caught.value.name == f"interaction_kwargs.{key}"
    assert caught.value.got == kwargs.get(key)
