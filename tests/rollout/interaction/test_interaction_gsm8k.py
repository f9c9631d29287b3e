"""The GSM8K user rejects answers until one is correct or `max_turns` is reached."""

from __future__ import annotations

import pytest

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.rollout.interaction.gsm8k import WRONG_ANSWER_REPLY, Gsm8kInteraction
from mega_agentrl.rollout.interaction.session import InteractionRegistry
from mega_agentrl.types.records import StopReason
from tests.chat_models import save_tokenizer
from tests.config.refusals import refused_input
from tests.rollout.chat_run import converse, make_kit, prompt_for


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return HFCodec(save_tokenizer("llama3", tmp_path_factory.mktemp("llama3")))


@pytest.mark.parametrize(
    ("turns", "reason", "reward"),
    [
        (["It is 17.", "No, 18."], StopReason.interaction_end, 1.0),
        (["$18.00"], StopReason.interaction_end, 1.0),
        (["17", "16", "15"], StopReason.interaction_limit, 0.0),
        (["I do not know", "36/2"], StopReason.interaction_end, 1.0),
    ],
)
async def test_answers_are_judged_until_one_is_right(codec, turns, reason, reward):
    user = Gsm8kInteraction()
    user.max_turns = 2
    kit = make_kit(codec)
    kwargs = {"interaction_kwargs": {"name": "gsm8k_user", "ground_truth": "9*2\n#### 18"}}
    got, script = await converse(
        codec,
        turns,
        kit=kit,
        prompt=prompt_for(codec, kit, extra_info=kwargs),
        interactions=InteractionRegistry([user]),
    )
    assert got.stop_reason is reason and got.tool_rewards == {"gsm8k_user": reward}
    assert len(script.requests) == len(turns) and got.template_drift == ""
    assert got.response_text.count(WRONG_ANSWER_REPLY) == len(turns) - 1


async def test_a_fork_has_its_own_state():
    user = Gsm8kInteraction()
    state = await user.create({"ground_truth": "3"})
    fork = await user.fork(state)
    await user.respond(fork, [{"role": "assistant", "content": "3"}])
    assert (await user.calc_reward(state), await user.calc_reward(fork)) == (0.0, 1.0)


@pytest.mark.parametrize("kwargs", [{}, {"ground_truth": "none"}, {"ground_truth": None}])
def test_without_a_number_there_is_nothing_to_judge(kwargs):
    error = refused_input(Gsm8kInteraction().check_kwargs, kwargs)
    assert error.name.endswith("interaction_kwargs.ground_truth")
