"""The critic's ranks beside the policy's."""

from mega_agentrl.config.choices import Advantage
from mega_agentrl.estimate.change import num_ranks
from mega_agentrl.estimate.critic_memory import critic_memory
from mega_agentrl.estimate.device import Device
from mega_agentrl.estimate.policy_memory import policy_memory
from tests.estimate.configs import configured
from tests.estimate.shapes import released


def test_it_is_a_policy_without_its_head_reference_and_transfer():
    config, shape = configured(tensor=4, pipeline=2, sequence=True), released("qwen2.5-7b")
    assert critic_memory(config, shape, Device()) == []
    assert num_ranks(config) == 9
    config.algo.advantage, config.algo.kl_coef = Advantage.gae, 0.1
    policy, critic = policy_memory(config, shape, Device()), critic_memory(config, shape, Device())
    assert num_ranks(config) == 17
    # Of 152,064 rows of 3,584 numbers in two bytes, each tensor rank has a quarter.
    first, last = zip(policy, critic, strict=True)
    assert first[0].weights == first[1].weights
    head = last[0].num_parameters - last[1].num_parameters
    assert head == 152_064 * 3_584 // 4 - 3_584
    for memory, other in (first, last):
        assert other.activations == memory.activations
        assert (other.logits, other.transfer, other.reference, other.host) == (0, 0, 0, 0)
        assert other.peak <= memory.peak


def test_an_evaluation_alone_has_none():
    config = configured()
    config.algo.advantage, config.total_steps = Advantage.gae, 0
    assert critic_memory(config, released("qwen2.5-7b"), Device()) == []
    assert num_ranks(config) == 2
