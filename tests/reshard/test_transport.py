"""Links between real processes: who comes, who does not, and who dies."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.courier import Courier
from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.transport import WeightLink, join, open_store
from tests.reshard.fake_rollout import FakeRollout
from tests.reshard.fake_trainer import FakeTrainer
from tests.reshard.faults import Fault, cut
from tests.reshard.rollout_cuts import rollout_layout
from tests.tiny_models import make_tiny_model

DEADLINE_S = 20.0
SHORT_S = 5.0
FRAME = Fault(kind="kill", rank=1, frame=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def sinks(folder):
    shape = ModelShape.from_folder(folder)
    return [rollout_layout(shape, rank, 2) for rank in range(2)]


@pytest.fixture(scope="module")
def trainer_of_module(folder):
    trainer = FakeTrainer(folder, tensor=2, pipeline=1, timeout_s=DEADLINE_S)
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(trainer_of_module):
    trainer_of_module.revive()
    return trainer_of_module


@pytest.fixture
def rollout(sinks):
    rollout = FakeRollout(sinks)
    yield rollout
    rollout.close()


def connect(trainer, rollout, sinks, **options):
    rollout.join(trainer.connect(sinks, **options))
    trainer.wait_joined()


def check_transfer(trainer, rollout, folder, version):
    trainer.send(folder, version)
    assert rollout.receive(version) == [None, None]
    assert rollout.mismatches(trainer.digests()) == [[], []]
    tensors = load_file(folder / "model.safetensors")
    for landing in rollout.landings:
        for name, expected in cut(landing.layout, tensors).items():
            assert torch.equal(landing.params[name], expected), name


def test_a_second_link_over_the_same_store(trainer, rollout, sinks, folder):
    connect(trainer, rollout, sinks)
    check_transfer(trainer, rollout, folder, 1)
    check_transfer(trainer, rollout, folder, 2)
    connect(trainer, rollout, sinks, bucket_bytes=700)
    check_transfer(trainer, rollout, folder, 3)


def test_an_engine_that_comes_later_gets_a_link_of_its_own(trainer, rollout, sinks, folder):
    connect(trainer, rollout, sinks)
    check_transfer(trainer, rollout, folder, 1)
    shape = ModelShape.from_folder(folder)
    late = [rollout_layout(shape, 0, 1)]
    alone = FakeRollout(late)
    connect(trainer, alone, late)
    trainer.send(folder, 1)
    assert alone.receive(1) == [None]
    assert alone.mismatches(trainer.digests()) == [[]]
    alone.close()


def test_ranks_that_do_not_come_are_named_by_those_that_do(trainer, sinks):
    """A trainer rank and a rollout rank are away; one of each has come."""
    link = trainer.connect(sinks, away=[1], timeout_s=SHORT_S)
    with pytest.raises(RuntimeError, match=r"the 4 ranks did not meet .* within 5 s.*rank 1, 3:"):
        join(link, 2, sinks[0])
    (error,) = trainer.results()
    assert isinstance(error, RuntimeError)
    assert "rank 0 of the weight transfer" in str(error)
    assert "missing: rank 1, 3:" in str(error)


def test_a_meeting_point_that_does_not_answer(trainer, sinks):
    store = open_store("127.0.0.1", 1.0)
    link = WeightLink(
        address="127.0.0.1",
        port=store.port,
        key="gone",
        plan=trainer.plan(sinks, 1000),
        timeout_s=1.0,
    )
    del store
    with pytest.raises(RuntimeError, match=r"rank 2 of .* did not meet.*did not answer"):
        join(link, 2, sinks[0])


def test_a_rank_that_was_killed_before_is_named(trainer, rollout, sinks, folder):
    connect(trainer, rollout, sinks)
    trainer.kill(1)
    start_s = time.monotonic()
    trainer.send(folder, 1)
    check_death(rollout.receive(1), trainer.results(), start_s)


def test_a_rank_that_is_killed_in_the_middle_is_named(trainer, rollout, sinks, folder):
    connect(trainer, rollout, sinks, bucket_bytes=2000)
    start_s = time.monotonic()
    trainer.send(folder, 1, fault=FRAME)
    errors = rollout.receive(1)
    check_death(errors, trainer.results(), start_s)
    assert trainer.processes[1].exitcode == 9


def check_death(errors, answers, start_s):
    assert time.monotonic() - start_s < DEADLINE_S  # nobody waits for it
    assert any("could not receive from rank 1 bucket" in str(error) for error in errors)
    assert any("trainer rank 1 is gone" in str(answer) for answer in answers)


def test_after_a_death_all_meet_again(trainer, rollout, sinks, folder):
    trainer.kill(0)  # with the meeting point
    assert trainer.revive() == [0]
    connect(trainer, rollout, sinks)
    check_transfer(trainer, rollout, folder, 1)


def test_a_plan_from_another_layout_is_refused_by_its_rank(trainer, rollout, sinks):
    """Names of two tensors exchanged that are not cut alike."""
    wrong = [
        replace(shard, blocks=tuple(replace(b, hf_rect=_up(b.hf_rect)) for b in shard.blocks))
        for shard in sinks[0]
    ]
    link = trainer.connect(sinks)
    rollout.landings[0].layout = wrong
    with pytest.raises(ValueError, match=r"rank 2 of the weight transfer: .*lies in no block"):
        rollout.join(link)
    trainer.wait_joined()


def _up(rect):
    return rect.shifted((0,) * len(rect.start), (1,) * len(rect.start))


def test_a_link_survives_plain_values(trainer, sinks):
    link = WeightLink(
        address="host",
        port=1,
        key="k",
        plan=trainer.plan(sinks, 1000),
        timeout_s=3.0,
        first_sink=2,
        locations=(Location(0), Location(1, 3)),
    )
    plain = link.to_plain()
    assert pickle.loads(pickle.dumps(plain)) == plain
    assert WeightLink.from_plain(**plain) == link
    assert WeightLink.from_plain(**plain) != replace(link, port=2)


def test_join_makes_a_courier_of_the_rank(trainer, rollout, sinks):
    connect(trainer, rollout, sinks)
    assert [courier.rank for courier in rollout.couriers] == [2, 3]
    assert all(isinstance(courier, Courier) for courier in rollout.couriers)
