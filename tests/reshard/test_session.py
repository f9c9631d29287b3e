"""Links between real processes: who comes, who does not, and who dies."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.executor import TransferExecutor
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.session import TransferSession, join_session, open_store
from mega_agentrl.reshard.topology import RankLocation
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
def rollout_layouts(folder):
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
def rollout(rollout_layouts):
    rollout = FakeRollout(rollout_layouts)
    yield rollout
    rollout.close()


def connect(trainer, rollout, rollout_layouts, **options):
    rollout.join(trainer.connect(rollout_layouts, **options))
    trainer.wait_joined()


def check_transfer(trainer, rollout, folder, version):
    trainer.send(folder, version)
    assert rollout.receive(version) == [None, None]
    assert rollout.find_mismatches(trainer.digests()) == [[], []]
    tensors = load_file(folder / "model.safetensors")
    for writer in rollout.writers:
        for name, expected in cut(writer.layout, tensors).items():
            assert torch.equal(writer.params[name], expected), name


def test_a_second_session_over_the_same_store(trainer, rollout, rollout_layouts, folder):
    connect(trainer, rollout, rollout_layouts)
    check_transfer(trainer, rollout, folder, 1)
    check_transfer(trainer, rollout, folder, 2)
    connect(trainer, rollout, rollout_layouts, bucket_bytes=700)
    check_transfer(trainer, rollout, folder, 3)


def test_an_engine_that_comes_later_gets_a_session_of_its_own(
    trainer, rollout, rollout_layouts, folder
):
    connect(trainer, rollout, rollout_layouts)
    check_transfer(trainer, rollout, folder, 1)
    shape = ModelShape.from_folder(folder)
    late = [rollout_layout(shape, 0, 1)]
    alone = FakeRollout(late)
    connect(trainer, alone, late)
    trainer.send(folder, 1)
    assert alone.receive(1) == [None]
    assert alone.find_mismatches(trainer.digests()) == [[]]
    alone.close()


def test_ranks_that_do_not_come_are_named_by_those_that_do(trainer, rollout_layouts):
    """A trainer rank and a rollout rank are away; one of each has come."""
    session = trainer.connect(rollout_layouts, away=[1], timeout_s=SHORT_S)
    with pytest.raises(RuntimeError, match=r"the 4 ranks did not meet .* within 5 s.*rank 1, 3:"):
        join_session(session, 2, rollout_layouts[0])
    (error,) = trainer.results()
    assert isinstance(error, RuntimeError)
    assert "rank 0 of the weight transfer" in str(error)
    assert "missing: rank 1, 3:" in str(error)


def test_a_meeting_point_that_does_not_answer(trainer, rollout_layouts):
    store = open_store("127.0.0.1", 1.0)
    session = TransferSession(
        address="127.0.0.1",
        port=store.port,
        key="gone",
        plan=trainer.plan(rollout_layouts, 1000),
        timeout_s=1.0,
    )
    del store
    with pytest.raises(RuntimeError, match=r"rank 2 of .* did not meet.*did not answer"):
        join_session(session, 2, rollout_layouts[0])


def test_a_rank_that_was_killed_before_is_named(trainer, rollout, rollout_layouts, folder):
    connect(trainer, rollout, rollout_layouts)
    trainer.kill(1)
    start_s = time.monotonic()
    trainer.send(folder, 1)
    check_death(rollout.receive(1), trainer.results(), start_s)


def test_a_rank_that_is_killed_in_the_middle_is_named(trainer, rollout, rollout_layouts, folder):
    connect(trainer, rollout, rollout_layouts, bucket_bytes=2000)
    start_s = time.monotonic()
    trainer.send(folder, 1, fault=FRAME)
    errors = rollout.receive(1)
    check_death(errors, trainer.results(), start_s)
    assert trainer.processes[1].exitcode == 9


def check_death(errors, answers, start_s):
    assert time.monotonic() - start_s < DEADLINE_S  # nobody waits for it
    assert any("could not receive from rank 1 bucket" in str(error) for error in errors)
    assert any("trainer rank 1 is gone" in str(answer) for answer in answers)


def test_after_a_death_all_meet_again(trainer, rollout, rollout_layouts, folder):
    trainer.kill(0)  # with the store
    assert trainer.revive() == [0]
    connect(trainer, rollout, rollout_layouts)
    check_transfer(trainer, rollout, folder, 1)


def test_a_plan_from_another_layout_is_refused_by_its_rank(trainer, rollout, rollout_layouts):
    """Names of two tensors exchanged that are not cut alike."""
    wrong = [
        replace(shard, blocks=tuple(replace(b, hf_rect=_up(b.hf_rect)) for b in shard.blocks))
        for shard in rollout_layouts[0]
    ]
    session = trainer.connect(rollout_layouts)
    rollout.writers[0].layout = wrong
    with pytest.raises(ValueError, match=r"rank 2 of the weight transfer: .*lies in no block"):
        rollout.join(session)
    trainer.wait_joined()


def _up(rect):
    return rect.translate((0,) * len(rect.start), (1,) * len(rect.start))


def test_a_session_survives_plain_values(trainer, rollout_layouts):
    session = TransferSession(
        address="host",
        port=1,
        key="k",
        plan=trainer.plan(rollout_layouts, 1000),
        timeout_s=3.0,
        rollout_rank_offset=2,
        locations=(RankLocation(0), RankLocation(1, 3)),
    )
    plain = session.to_init_info()
    assert pickle.loads(pickle.dumps(plain)) == plain
    assert TransferSession.from_bytes(**plain) == session
    assert TransferSession.from_bytes(**plain) != replace(session, port=2)


def test_join_makes_an_executor_of_the_rank(trainer, rollout, rollout_layouts):
    connect(trainer, rollout, rollout_layouts)
    assert [executor.rank for executor in rollout.executors] == [2, 3]
    assert all(isinstance(executor, TransferExecutor) for executor in rollout.executors)
