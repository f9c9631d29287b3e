"""Two real sender processes and two receiving threads over gloo."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mega_agentrl.reshard.plan import make_plan
from mega_agentrl.reshard.transport import SendReport, ShardReceiver, WeightLink
from tests.reshard.fake_trainer import FakeTrainer, shards_of

SHAPES = {
    "embed": (10, 6),
    "a.gate_proj": (8, 6),
    "a.up_proj": (8, 6),
    "a.down_proj": (6, 8),
    "norm": (6,),
}


def tensors_of(seed):
    generator = torch.manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make(num_sinks, bucket_bytes):
    layouts = [shards_of(tensors_of(0), rank, 2)[0] for rank in range(2)]
    return make_plan(layouts, SHAPES, "float32", num_sinks, bucket_bytes=bucket_bytes)


def join(link, count):
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda sink: ShardReceiver.join(link, sink=sink), range(count)))


def receive_all(receivers, version):
    with ThreadPoolExecutor(len(receivers)) as pool:
        return list(pool.map(lambda receiver: dict(receiver.receive(version)), receivers))


def test_every_sink_gets_every_tensor_version_after_version():
    trainer = FakeTrainer(make(num_sinks=2, bucket_bytes=100))
    try:
        receivers = join(trainer.link, 2)
        for version in (1, 2, 3):
            tensors = tensors_of(version)
            trainer.send(tensors, version)
            for got in receive_all(receivers, version):
                assert got.keys() == tensors.keys()
                for name, tensor in tensors.items():
                    assert torch.equal(got[name], tensor), name
            reports = trainer.results()
            assert all(isinstance(report, SendReport) for report in reports)
            assert sum(r.num_bytes for r in reports) >= 2 * sum(t.nbytes for t in tensors.values())
    finally:
        trainer.close()


def test_a_corrupted_block_is_named():
    trainer = FakeTrainer(make(num_sinks=1, bucket_bytes=2**20))
    try:
        (receiver,) = join(trainer.link, 1)
        trainer.send(tensors_of(1), 1, corrupt="embed")
        with pytest.raises(ValueError, match=r"embed .*trainer rank 0 .*bucket 0"):
            dict(receiver.receive(1))
    finally:
        trainer.close()


def test_a_rank_that_died_before_the_transfer_is_named_as_well():
    trainer = FakeTrainer(make(num_sinks=1, bucket_bytes=64), timeout_s=5.0)
    try:
        (receiver,) = join(trainer.link, 1)
        trainer.kill(1)
        time.sleep(1.0)  # until the closed connection is noticed: posting the receive now fails
        trainer.send(tensors_of(1), 1)
        with pytest.raises(RuntimeError, match=r"could not receive from rank 1 in bucket \d+"):
            dict(receiver.receive(1))
    finally:
        trainer.close()


def test_a_dead_trainer_rank_ends_the_wait_with_its_name():
    trainer = FakeTrainer(make(num_sinks=1, bucket_bytes=64), timeout_s=5.0)
    try:
        (receiver,) = join(trainer.link, 1)
        trainer.kill(1)
        trainer.send(tensors_of(1), 1)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"could not receive from rank 1 in bucket \d+"):
            dict(receiver.receive(1))
        assert time.monotonic() - start < 10
    finally:
        trainer.close()


def test_ranks_that_do_not_come_are_reported_within_the_deadline():
    trainer = FakeTrainer(make(num_sinks=2, bucket_bytes=64), timeout_s=3.0)
    try:
        with pytest.raises(RuntimeError, match="4 ranks did not meet"):
            ShardReceiver.join(trainer.link, sink=0)
    finally:
        trainer.close()


def test_a_link_survives_plain_values():
    link = WeightLink("host", 1, make(1, 64), 3.0, first_sink=2)
    assert WeightLink.from_plain(**link.to_plain()) == link
    assert WeightLink.from_plain(**link.to_plain()) != replace(link, port=2)
