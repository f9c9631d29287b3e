"""The policy group assembles what its ranks answer, with small Ray actors in place of Megatron."""

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.batch.packed_rows import PackedScores
from mega_agentrl.config.enums import AresMode
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.workers.policy_group import RANK_OPERATIONS, PolicyGroup
from mega_agentrl.types.batch import TrainBatch, UpdateStats
from mega_agentrl.types.errors import RankLostError
from tests.estimate.shapes import config_folder


@ray.remote(num_cpus=0)
class Rank:
    """Data-parallel rank of two; log-probs are minus the token ids, references ten less."""

    def __init__(self, rank):
        self.rank = rank
        self.reset()

    def reset(self):
        self.methods, self.args = [], None

    def call(self, method, *args):
        assert method in RANK_OPERATIONS
        self.methods.append(method)
        if method == "compute_log_probs":
            shard, reference = args
            logp_M = -response_tokens(shard.rows) - np.float32(10 if reference else 0)
            return PackedScores(
                row_R=shard.rows.row_R, values=(logp_M, np.full_like(logp_M, self.rank))
            )
        if method in ("update", "sft_step"):
            shard, *scored = args
            self.args = len(shard.new_rows.token_N), shard.gather_rows(*(scored or [None])).token_N
            return UpdateStats(
                loss=float(self.rank),
                grad_norm=1.0,
                learning_rate=0.0,
                num_tokens=1,
                num_skipped_steps=0,
                metrics={},
            )
        if method == "export_hf":
            raise OSError("disk full")
        if method in ("save_checkpoint", "set_objective", "stop_profile"):
            self.args = args
        if method == "load_checkpoint":
            if args[0].endswith("damaged"):
                raise ValueError(f"checkpoint {args[0]}: data has 3 bytes, expected 4")
            return {"step": 7, "from": args[0]}
        return None

    def find_free_address(self):
        return "127.0.0.1", 1

    def start(self, host, port):
        self.methods.append(f"start {host}:{port}")

    def visible_gpus(self):
        return str(4 + self.rank)

    def recorded_methods(self):
        return self.methods

    def last_args(self):
        return self.args


def response_tokens(rows):
    """Return the response tokens of all rows, float32."""
    return np.concatenate(
        [
            tokens[length:].astype(np.float32)
            for tokens, length in zip(
                rows.sequences(range(rows.num_rows)), rows.prompt_length_R, strict=True
            )
        ]
    )


def batch():
    zeros = torch.zeros(3, 2)
    return TrainBatch(
        prompt_ids=((1,), (2,), (3,)),
        response_BT=torch.tensor([[1, 2], [3, 4], [5, 6]]),
        length_B=torch.tensor([2, 2, 2]),
        mask_BT=torch.ones(3, 2, dtype=torch.bool),
        group_B=torch.tensor([0, 0, 1]),
        reward_B=torch.zeros(3),
        tree_token_BT=torch.arange(6).view(3, 2),
        rollout_logp_BT=zeros,
        rollout_entropy_BT=zeros,
        version_BT=torch.zeros(3, 2, dtype=torch.int64),
    )


def group_of(actors, **algo):
    config = TrainConfig(
        model=ModelConfig(path=config_folder()),
        algo=AlgoConfig(**algo),
        parallel=ParallelConfig(data=len(actors)),
    )
    return PolicyGroup(actors, config), actors


@pytest.fixture(scope="module")
def ranks(ray_local):
    """Two processes for all tests that leave them alive."""
    return [Rank.remote(rank) for rank in range(2)]


@pytest.fixture
def group(ranks):
    ray.get([rank.reset.remote() for rank in ranks])
    return partial(group_of, ranks)


def test_log_probs_are_assembled_from_all_ranks(group):
    filled = group()[0].compute_log_probs(batch())
    assert filled.old_logp_BT.tolist() == [[-1, -2], [-3, -4], [-5, -6]]
    assert filled.entropy_BT.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert filled.ref_logp_BT is None


@pytest.mark.parametrize("algo", [{"kl_coef": 0.1}, {"ares": AresConfig(mode=AresMode.paper)}])
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


def test_only_rank_zero_is_profiled(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, actors = group()
    policy.start_profile()
    policy.stop_profile(Path("profile/a.json"))
    seen = [ray.get(actor.recorded_methods.remote()) for actor in actors]
    assert seen == [["start_profile", "stop_profile"], []]
    assert ray.get(actors[0].last_args.remote()) == (str(tmp_path / "profile" / "a.json"),)


def test_failing_rank_is_named(group, tmp_path):
    with pytest.raises(RemoteCallError, match=r"export_hf .*policy rank \d: OSError"):
        group()[0].export_hf(tmp_path)


def test_dead_rank_differs_from_a_failure_and_close_kills_the_others(ray_local, tmp_path):
    policy, actors = group_of([Rank.remote(rank) for rank in range(2)])
    ray.kill(actors[1])
    with pytest.raises(RankLostError, match="policy rank 1 died"):
        policy.update(batch())
    # Rank 0 answers first here, with its own failure.
    with pytest.raises(RankLostError, match=r"policy rank 1 died"):
        policy.export_hf(tmp_path)
    policy.close()
    policy.close()
    # The kill is on its way when close returns; a call may still get through before it.
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actors[0].recorded_methods.remote())
            time.sleep(0.1)


def test_every_rank_saves_under_the_same_absolute_path(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, actors = group()
    policy.save_checkpoint(Path("checkpoints/step-1"), {"step": 1}, 2)
    for actor in actors:
        folder, extra, keep = ray.get(actor.last_args.remote())
        assert folder == str(tmp_path / "checkpoints" / "step-1")
        assert (extra, keep) == ({"step": 1}, 2)


def test_load_checkpoint_returns_the_extra_values_and_names_a_damaged_one(group, tmp_path):
    policy, actors = group()
    assert policy.load_checkpoint(tmp_path) == {"step": 7, "from": str(tmp_path)}
    for actor in actors:
        assert ray.get(actor.recorded_methods.remote()) == ["load_checkpoint"]
    with pytest.raises(RemoteCallError, match=r"load_checkpoint .*policy rank \d: .*3 bytes"):
        policy.load_checkpoint(tmp_path / "damaged")


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


def test_operations_are_methods_of_the_rank():
    assert set(RANK_OPERATIONS) <= set(dir(PolicyRank))
