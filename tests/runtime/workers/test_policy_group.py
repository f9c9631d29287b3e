"""The policy group assembles what its ranks answer, with small Ray actors in place of Megatron."""

from functools import partial
from pathlib import Path

import pytest
import ray
import torch

from mega_agentrl.config.enums import AresMode, RolloutCorrection
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.runtime.remote_calls import PolicyRankDiedError, RemoteCallError
from mega_agentrl.runtime.workers.policy_group import RANK_OPERATIONS, PolicyGroup
from tests.estimate.shapes import config_folder
from tests.runtime.fake_ranks import FakeRank, batch, wait_until_dead


def group_of(actors, **algo):
    config = TrainConfig(
        model=ModelConfig(path=config_folder()),
        algo=AlgoConfig(**algo),
        parallel=ParallelConfig(data=len(actors)),
    )
    return PolicyGroup(actors, config), actors


@pytest.fixture
def group(fake_ranks):
    return partial(group_of, fake_ranks)


def test_log_probs_are_assembled_from_all_ranks(group):
    filled = group()[0].compute_log_probs(batch())
    assert filled.old_logp_BT.tolist() == [[-1, -2], [-3, -4], [-5, -6]]
    assert filled.entropy_BT.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert filled.ref_logp_BT is None


@pytest.mark.parametrize(
    "algo", [{"kl_coef": 0.1}, {"ares": AresConfig(mode=AresMode.paper)}], ids=["kl", "ares"]
)
def test_reference_log_probs_are_computed_when_needed(algo, group):
    policy, _ = group(**algo)
    assert torch.equal(
        policy.compute_log_probs(batch()).ref_logp_BT, -batch().response_BT.float() - 10
    )


def test_start_joins_all_ranks_at_the_address_of_rank_zero(group):
    policy, actors = group()
    policy.start()
    for actor in actors:
        assert ray.get(actor.recorded_methods.remote()) == ["start 127.0.0.1:1", "load_hf"]


def test_an_update_sends_no_tokens_that_the_rank_has_scored(group):
    policy, actors = group()
    scored = policy.compute_log_probs(batch())
    assert policy.update(scored).loss == 0.0, "the stats of rank zero"
    # Prompt and response of rows 0 and 2, and of row 1.
    expected = [[1, 1, 2, 3, 5, 6], [2, 3, 4]]
    for actor, tokens in zip(actors, expected, strict=True):
        num_new, token_N = ray.get(actor.last_args.remote())
        assert (num_new, token_N.tolist()) == (0, tokens)
    for call in (policy.update, policy.sft_step):
        call(scored)
        for actor, tokens in zip(actors, expected, strict=True):
            num_new, token_N = ray.get(actor.last_args.remote())
            assert (num_new, token_N.tolist()) == (len(tokens), tokens)


def test_without_a_scoring_pass_an_update_returns_the_log_probs_of_its_rows(group):
    policy, _ = group()
    has_signal_B = torch.tensor([True, False, True])
    stats = policy.update(batch(), None, has_signal_B)
    assert stats.metrics["num_spared_tokens"] > 0
    assert stats.scores.is_scored_B.tolist() == has_signal_B.tolist()
    expected_BT = torch.where(has_signal_B.unsqueeze(1), -batch().response_BT.float(), 0.0)
    assert torch.equal(stats.scores.logp_BT, expected_BT)
    with_pass, _ = group(rollout_correction=RolloutCorrection.token_truncate)
    assert with_pass.update(with_pass.compute_log_probs(batch())).scores is None


def test_only_rank_zero_is_profiled(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, actors = group()
    policy.start_profile()
    policy.stop_profile(Path("profile/a.json"))
    methods = [ray.get(actor.recorded_methods.remote()) for actor in actors]
    assert methods == [["start_profile", "stop_profile"], []]
    assert ray.get(actors[0].last_args.remote()) == (str(tmp_path / "profile" / "a.json"),)


def test_failing_rank_is_named(group, tmp_path):
    with pytest.raises(RemoteCallError) as caught:
        group()[0].export_hf(tmp_path)
    assert caught.value.operation == "policy export_hf"
    assert caught.value.processes[0] in ("policy rank 0", "policy rank 1")
    assert "disk full" in str(caught.value), "the error of the rank reaches the user"


def test_dead_rank_differs_from_a_failure_and_close_kills_the_others(ray_local, tmp_path):
    policy, actors = group_of([FakeRank.remote(rank) for rank in range(2)])
    ray.kill(actors[1])
    wait_until_dead(actors[1].last_args)
    # In `export_hf` rank 0 may answer first, with its own failure.
    for call in (partial(policy.update, batch()), partial(policy.export_hf, tmp_path)):
        with pytest.raises(PolicyRankDiedError) as caught:
            call()
        assert caught.value.processes == ("policy rank 1",)
    policy.close()
    policy.close()
    wait_until_dead(actors[0].last_args)


def test_every_rank_saves_under_the_same_absolute_path(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, actors = group()
    assert policy.start_save(Path("checkpoints/step-1")) == "manifest of rank 0"
    for actor in actors:
        assert ray.get(actor.last_args.remote()) == (str(tmp_path / "checkpoints" / "step-1"),)


def test_a_save_is_done_when_all_ranks_are(group):
    policy, _ = group()
    assert policy.save_result(0.0) is None
    assert policy.save_result(1.0) == {"__0_0.distcp": 0, "__1_0.distcp": 1}


def test_load_checkpoint_returns_the_extra_values_and_names_a_damaged_one(group, tmp_path):
    policy, actors = group()
    assert policy.load_checkpoint(tmp_path) == {"step": 7, "from": str(tmp_path)}
    for actor in actors:
        assert ray.get(actor.recorded_methods.remote()) == ["load_checkpoint"]
    with pytest.raises(RemoteCallError) as caught:
        policy.load_checkpoint(tmp_path / "damaged")
    assert caught.value.operation == "policy load_checkpoint"
    assert "3 bytes" in str(caught.value), "the error of the rank reaches the user"


def test_set_objective_reaches_group_and_ranks(group):
    policy, actors = group()
    algo = AlgoConfig(kl_coef=0.1)
    policy.set_objective(algo, 0.7)
    for actor in actors:
        assert ray.get(actor.last_args.remote()) == (algo, 0.7)
    assert policy.compute_log_probs(batch()).ref_logp_BT is not None
    policy.set_objective(AlgoConfig(), 1.0)
    assert policy.compute_log_probs(batch()).ref_logp_BT is None


def test_colocated_engine_gets_the_gpus_of_its_ranks(group):
    policy, _ = group()
    assert [policy.gpus_for_engine(index) for index in (0, 1)] == ["4", "5"]
    policy._config.engine.tensor_parallel_size = 2
    assert policy.gpus_for_engine(0) == "4,5"


@pytest.mark.extended
def test_operations_are_methods_of_the_rank():
    # They import Megatron.
    from mega_agentrl.actor.critic import CriticRank
    from mega_agentrl.actor.policy import PolicyRank
    from mega_agentrl.actor.reward_model import RewardModelRank

    methods = {*dir(PolicyRank), *dir(CriticRank), *dir(RewardModelRank)}
    assert set(RANK_OPERATIONS) <= methods
