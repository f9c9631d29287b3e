"""The critic's ranks beside the policy's."""

from mega_agentrl.config.enums import AdvantageEstimator
from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.memory.critic import estimate_critic_memory
from mega_agentrl.estimate.memory.policy import estimate_policy_memory
from mega_agentrl.estimate.preflight.config_change import num_required_gpus
from tests.estimate.configs import configured
from tests.estimate.shapes import released


def test_it_is_a_policy_without_its_head_reference_and_transfer():
    config, shape = configured(tensor=4, pipeline=2, sequence_parallel=True), released("qwen2.5-7b")
    assert estimate_critic_memory(config, shape, DeviceSpec()) == []
    assert num_required_gpus(config) == 9
    config.algo.advantage, config.algo.kl_coef = AdvantageEstimator.gae, 0.1
    policy, critic = (
        estimate_policy_memory(config, shape, DeviceSpec()),
        estimate_critic_memory(config, shape, DeviceSpec()),
    )
    assert num_required_gpus(config) == 17
    # Of 152,064 rows of 3,584 numbers in two bytes, each tensor rank has a quarter.
    first, last = zip(policy, critic, strict=True)
    assert first[0].weights == first[1].weights
    head = last[0].num_parameters - last[1].num_parameters
    assert head == 152_064 * 3_584 // 4 - 3_584
    for memory, other in (first, last):
        assert other.activations == memory.activations
        assert (
            other.head_workspace,
            other.transfer_buckets,
            other.reference_staging,
            other.pinned_host,
        ) == (0, 0, 0, 0)
        assert other.peak <= memory.peak


def test_an_evaluation_alone_has_none():
    config = configured()
    config.algo.advantage, config.total_steps = AdvantageEstimator.gae, 0
    assert estimate_critic_memory(config, released("qwen2.5-7b"), DeviceSpec()) == []
    assert num_required_gpus(config) == 2
