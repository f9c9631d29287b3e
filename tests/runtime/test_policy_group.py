"""The policy group assembles what its ranks answer, with small Ray actors in place of Megatron."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from mega_agentrl.config.algo_schema import AlgoConfig, AresConfig
from mega_agentrl.config.choices import AresMode
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.runtime.policy_group import PolicyGroup
from mega_agentrl.runtime.remote import RemoteError
from mega_agentrl.runtime.turns import Holder, Turns
from mega_agentrl.types.batch import TrainBatch, UpdateStats
from mega_agentrl.types.faults import RankLostError


@ray.remote(num_cpus=0)
class Rank:
    """Data-parallel rank of two; log-probs are minus the token ids, references ten less."""

    def __init__(self, rank):
        self.rank = rank
        self.forget()

    def forget(self):
        self.methods, self.given = [], None

    def call(self, method, *args):
        self.methods.append(method)
        if method == "logprobs":
            batch, reference = args
            rows = list(range(self.rank, batch.num_rows, 2))
            logp = -batch.response_BT[rows].float() - (10 if reference else 0)
            return rows, logp, torch.full_like(logp, float(self.rank))
        if method == "update":
            return UpdateStats(
                loss=float(self.rank),
                grad_norm=1.0,
                learning_rate=0.0,
                num_tokens=1,
                num_skipped=0,
                metrics={},
            )
        if method == "export":
            raise OSError("disk full")
        if method in ("save", "set_objective", "end_profile"):
            self.given = args
        if method == "resume":
            if args[0].endswith("damaged"):
                raise ValueError(f"checkpoint {args[0]}: data has 3 bytes, expected 4")
            return {"step": 7, "from": args[0]}
        return None

    def address(self):
        return "127.0.0.1", 1

    def start(self, host, port):
        self.methods.append(f"start {host}:{port}")

    def visible_gpus(self):
        return str(4 + self.rank)

    def seen(self):
        return self.methods

    def last(self):
        return self.given


def batch():
    zeros = torch.zeros(3, 2)
    return TrainBatch(
        prompt_ids=((1,), (2,), (3,)),
        response_BT=torch.tensor([[1, 2], [3, 4], [5, 6]]),
        length_B=torch.tensor([2, 2, 2]),
        mask_BT=torch.ones(3, 2, dtype=torch.bool),
        group_B=torch.tensor([0, 0, 1]),
        reward_B=torch.zeros(3),
        node_BT=torch.arange(6).view(3, 2),
        rollout_logp_BT=zeros,
        rollout_entropy_BT=zeros,
        version_BT=torch.zeros(3, 2, dtype=torch.int64),
    )


def group_of(actors, **algo):
    return PolicyGroup(actors, TrainConfig(algo=AlgoConfig(**algo))), actors


@pytest.fixture(scope="module")
def ranks(ray_local):
    """Two processes for all tests that leave them alive."""
    return [Rank.remote(rank) for rank in range(2)]


@pytest.fixture
def group(ranks):
    ray.get([rank.forget.remote() for rank in ranks])
    return partial(group_of, ranks)


def test_rows_of_all_ranks_come_together(group):
    policy, _ = group()
    filled = policy.add_logprobs(batch())
    assert filled.old_logp_BT.tolist() == [[-1, -2], [-3, -4], [-5, -6]]
    assert filled.entropy_BT.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert filled.ref_logp_BT is None


@pytest.mark.parametrize("algo", [{"kl_coef": 0.1}, {"ares": AresConfig(mode=AresMode.paper)}])
def test_the_reference_is_asked_where_the_objective_needs_it(algo, group):
    policy, _ = group(**algo)
    assert torch.equal(policy.add_logprobs(batch()).ref_logp_BT, -batch().response_BT.float() - 10)


def test_start_joins_all_ranks_at_the_address_of_the_first(group):
    policy, actors = group()
    policy.start()
    for actor in actors:
        assert ray.get(actor.seen.remote()) == ["start 127.0.0.1:1", "load"]


def test_stats_are_those_of_rank_zero(group):
    policy, _ = group()
    assert policy.update(batch()).loss == 0.0


def test_a_trace_is_taken_on_the_first_rank_alone(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, actors = group()
    policy.begin_profile()
    policy.end_profile(Path("profile/a.json"))
    seen = [ray.get(actor.seen.remote()) for actor in actors]
    assert seen == [["begin_profile", "end_profile"], []]
    assert ray.get(actors[0].last.remote()) == (str(tmp_path / "profile" / "a.json"),)


def test_a_failing_rank_is_named(group, tmp_path):
    policy, _ = group()
    with pytest.raises(RemoteError, match=r"policy export failed on policy rank \d: OSError"):
        policy.export(tmp_path)


def test_a_dead_rank_is_told_apart_from_a_failure_and_close_ends_the_others(ray_local, tmp_path):
    policy, actors = group_of([Rank.remote(rank) for rank in range(2)])
    ray.kill(actors[1])
    with pytest.raises(RankLostError, match="policy rank 1 died"):
        policy.update(batch())
    # Rank 0 answers first here, with what it fell over.
    with pytest.raises(RankLostError, match=r"policy rank 1 died"):
        policy.export(tmp_path)
    policy.close()
    policy.close()
    # The kill is on its way when close returns; a call may still get through before it.
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actors[0].seen.remote())
            time.sleep(0.1)


def test_it_is_ahead_of_the_engines_from_its_first_change_on(group, tmp_path):
    policy, _ = group()
    policy.add_logprobs(batch())
    assert not policy.is_ahead
    policy.update(batch())
    assert policy.is_ahead


def test_every_rank_saves_under_the_same_full_name(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, actors = group()
    policy.save(Path("checkpoints/step-1"), {"step": 1}, 2)
    for actor in actors:
        folder, extra, keep = ray.get(actor.last.remote())
        assert folder == str(tmp_path / "checkpoints" / "step-1")
        assert (extra, keep) == ({"step": 1}, 2)


def test_resume_gives_back_what_was_saved_beside(group, tmp_path):
    policy, actors = group()
    assert policy.resume(tmp_path) == {"step": 7, "from": str(tmp_path)}
    assert [ray.get(actor.seen.remote()) for actor in actors] == [["resume"], ["resume"]]


def test_a_damaged_checkpoint_is_named(group, tmp_path):
    policy, _ = group()
    message = r"policy resume failed on policy rank \d: .*damaged: data has 3 bytes, expected 4"
    with pytest.raises(RemoteError, match=message):
        policy.resume(tmp_path / "damaged")


def test_another_objective_reaches_group_and_ranks(group):
    policy, actors = group()
    algo = AlgoConfig(kl_coef=0.1)
    policy.set_objective(algo, 0.7)
    for actor in actors:
        assert ray.get(actor.last.remote()) == (algo, 0.7)
    assert policy.add_logprobs(batch()).ref_logp_BT is not None
    policy.set_objective(AlgoConfig(), 1.0)
    assert policy.add_logprobs(batch()).ref_logp_BT is None


def test_an_engine_that_shares_is_told_the_gpus_of_its_ranks(group):
    policy, _ = group()
    policy._placement = SimpleNamespace(of_engine=lambda index: f"beside {index}")
    assert [policy.lodging(index) for index in (0, 1)] == [("beside 0", "4"), ("beside 1", "5")]
    policy._config.engine.tensor = 2
    assert policy.lodging(0) == ("beside 0", "4,5")


def test_what_needs_the_model_takes_the_gpus_and_gives_them_back_as_they_were(group):
    policy, actors = group()
    turns = Turns(policy, SimpleNamespace(sleep=lambda: None, wake=lambda part, only: None))
    sent = []

    def send_again():
        turns.to_transfer([0])
        turns.to_engines([0])
        sent.append(turns.holder)

    policy.share(turns)
    policy.attach(SimpleNamespace(send_again=send_again))
    policy.reset_optimizer()
    assert sent == []  # nobody was served
    turns.make_room()
    policy.reset_optimizer()
    assert sent == [Holder.engines]
    policy.call_all("layout")
    assert turns.holder is Holder.engines
    policy.update(batch())
    assert turns.holder is Holder.policy
    seen = ray.get(actors[1].seen.remote())
    around = ["occupy", "reset_optimizer", "occupy", "occupy"]
    assert seen == ["reset_optimizer", "occupy", *around, "layout", "occupy", "update"]
