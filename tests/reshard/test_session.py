"""Sessions of real processes: ranks that join, ranks that are missing, and ranks that die."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore, PrefixStore, Store

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.session import (
    RanksNotJoinedError,
    TransferSession,
    join_session,
    open_store,
)
from mega_agentrl.reshard.topology import RankLocation
from tests.reshard.fake_rollout import FakeRollout
from tests.reshard.fake_trainer import FakeTrainer
from tests.reshard.faults import Fault, cut
from tests.reshard.rollout_cuts import rollout_layout
from tests.tiny_models import make_tiny_model
from tools.reshard_bench.join import established_connections, make_plan
from tools.simulate_reshard import count_store_requests

DEADLINE_S = 300.0
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
    assert not any(rollout.receive(version))
    assert not any(rollout.find_mismatches(trainer.digests()))
    tensors = load_file(folder / "model.safetensors")
    for writer in rollout.writers:
        for name, expected in cut(writer.layout, tensors).items():
            assert torch.equal(writer.params[name], expected), name


def test_a_later_engine_gets_a_session_of_its_own_over_the_same_store(
    trainer, rollout, rollout_layouts, folder
):
    connect(trainer, rollout, rollout_layouts)
    check_transfer(trainer, rollout, folder, 1)
    check_transfer(trainer, rollout, folder, 2)
    late_layouts = [rollout_layout(ModelShape.from_folder(folder), 0, 1)]
    late = FakeRollout(late_layouts)
    connect(trainer, late, late_layouts, bucket_bytes=700)
    check_transfer(trainer, late, folder, 2)
    late.close()


@pytest.mark.parametrize("rank", [0, 2], ids=["trainer", "rollout"])
def test_missing_ranks_are_named_by_those_that_have_joined(rank, trainer, rollout_layouts):
    """One trainer rank and one rollout rank have joined, the others have not."""
    store = open_store("127.0.0.1", DEADLINE_S)
    session = TransferSession(
        address="127.0.0.1",
        port=store.port,
        key="missing",
        plan=trainer.plan(rollout_layouts, 1000),
        timeout_s=0.5,
    )
    PrefixStore(session.store_prefix, store).set(f"joined/{2 - rank}", "1")
    layout = [*trainer.layouts, *rollout_layouts][rank]
    with pytest.raises(RanksNotJoinedError) as caught:
        join_session(session, rank, layout, store=store)
    assert (caught.value.rank, caught.value.missing_ranks) == (rank, (1, 3))


def test_a_store_that_does_not_answer_is_told_from_missing_ranks(trainer, rollout_layouts):
    store = open_store("127.0.0.1", 1.0)
    session = TransferSession(
        address="127.0.0.1",
        port=store.port,
        key="gone",
        plan=trainer.plan(rollout_layouts, 1000),
        timeout_s=1.0,
    )
    del store
    with pytest.raises(RanksNotJoinedError) as caught:
        join_session(session, 2, rollout_layouts[0])
    assert (caught.value.rank, caught.value.missing_ranks) == (2, None)


@pytest.mark.parametrize("fault", [None, FRAME], ids=["before", "in-the-middle"])
def test_a_killed_rank_is_named_and_nobody_waits_for_it(
    trainer, rollout, rollout_layouts, folder, fault
):
    connect(trainer, rollout, rollout_layouts, bucket_bytes=2000)
    if fault is None:
        trainer.kill(1)
    start_s = time.monotonic()
    trainer.send(folder, 1, fault=fault)
    errors, answers = rollout.receive(1), trainer.results()
    assert time.monotonic() - start_s < DEADLINE_S, "somebody waited until the deadline"
    assert any("could not receive from rank 1 bucket" in str(error) for error in errors)
    assert any("trainer rank 1 is gone" in str(answer) for answer in answers)
    assert fault is None or trainer.processes[1].exitcode == 9


def test_after_a_trainer_rank_died_all_ranks_join_a_new_session(
    trainer, rollout, rollout_layouts, folder
):
    trainer.kill(0)  # with the store
    assert trainer.revive() == [0]
    connect(trainer, rollout, rollout_layouts)
    check_transfer(trainer, rollout, folder, 1)


def test_a_plan_from_another_layout_is_refused_by_its_rank(trainer, rollout, rollout_layouts):
    """The blocks of a rank are one row further down than the plan says."""
    rollout.writers[0].layout = [
        replace(shard, blocks=tuple(replace(b, hf_rect=_down(b.hf_rect)) for b in shard.blocks))
        for shard in rollout_layouts[0]
    ]
    session = trainer.connect(rollout_layouts)
    with pytest.raises(InputError) as caught:
        rollout.join(session)
    assert caught.value.name.startswith("rank 2 of the weight transfer, blocks of this rank with ")
    trainer.wait_joined()


def _down(rect):
    return rect.translate((0,) * len(rect.start), (1,) * len(rect.start))


def test_a_session_survives_plain_values(trainer, rollout_layouts):
    session = TransferSession(
        address="host",
        port=1,
        key="k",
        plan=trainer.plan(rollout_layouts, 1000),
        timeout_s=3.0,
        locations=(RankLocation(0), RankLocation(1, 3)),
    )
    plain = pickle.loads(pickle.dumps(session.to_init_info(first_rank=2)))
    assert plain["first_rank"] == 2
    assert TransferSession.from_bytes(plain["session"]) == session


class CountingStore(Store):
    """Counts requests by their kind."""

    def __init__(self):
        super().__init__()
        self.inner, self.counts = HashStore(), Counter()

    def _ask(self, kind, *arguments):
        self.counts[kind] += 1
        return getattr(self.inner, kind)(*arguments)

    def set(self, key, value):
        return self._ask("set", key, value)

    def get(self, key):
        return self._ask("get", key)

    def add(self, key, amount):
        return self._ask("add", key, amount)

    def wait(self, keys, timeout=None):
        return self._ask("wait", keys, *([] if timeout is None else [timeout]))

    def check(self, keys):
        return self._ask("check", keys)


def test_a_join_connects_the_pairs_of_the_plan_and_has_one_barrier():
    plan, layout = make_plan(8, 2)
    session = TransferSession(
        address="127.0.0.1", port=1, key="link", plan=plan, timeout_s=DEADLINE_S
    )
    store, before = CountingStore(), established_connections()
    with ThreadPoolExecutor(plan.world_size) as pool:
        executors = list(
            pool.map(
                lambda rank: join_session(session, rank, [layout], store=store),
                range(plan.world_size),
            )
        )
    num_pairs = len(session.hops())
    assert num_pairs == 8
    # Both ends are here. gloo may connect a pair again where a connection takes long.
    assert 2 * num_pairs <= len(established_connections() - before) < 2 * 2 * num_pairs < 10 * 9
    assert store.counts["add"] == plan.world_size
    assert store.counts.total() == count_store_requests(plan.world_size, num_pairs)
    for executor in executors:
        executor.close()
