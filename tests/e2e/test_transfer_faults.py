"""200 random faults over real gloo processes: each is caught before anything could be served,
the message names what was hit, and the next transfer is right, bit for bit.

`make test-all` has every kind of fault in two cases, but not those draws whose ranks wait for each
other until the deadline.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.reshard.fake_rollout import FakeRollout
from tests.reshard.fake_trainer import FakeTrainer
from tests.reshard.faults import (
    CONTENT_FAULTS,
    FRAME_FAULTS,
    TOLD_FAULTS,
    Fault,
    can_hit,
    cut,
)
from tests.reshard.rollout_cuts import rollout_layout
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.extended

NUM_TRAINER = 4
DEADLINE_S = 20.0  # of each wait; ranks that wait for each other fail after it
BUCKET_BYTES = (500, 2000, 6000)
KINDS = CONTENT_FAULTS + FRAME_FAULTS + TOLD_FAULTS
PASSED_ON = ("flip", "drop", "twice", "stale", "reorder")
WAYS = {
    **{kind: {"proof"} for kind in CONTENT_FAULTS},
    **{kind: {"header"} for kind in FRAME_FAULTS},
    "kill": {"gone"},
    "plan": {"join", "header", "proof"},
    "names": {"join", "proof"},
}
"""How a fault of each kind may show: see `hit_by`."""


@dataclass(frozen=True)
class Case:
    """Trainer ranks TP2 x PP2 of a model, to `engines` of `tensor` ranks each. one_target: every
    trainer rank sends to one rollout rank, so that nothing can go astray.
    """

    model: str
    tensor: int
    engines: int
    dtype: str
    one_target: bool = False
    num_faults: int = 40

    @property
    def name(self):
        return f"{self.model}-{self.engines}xTP{self.tensor}"


CASES = [
    Case("qwen3", 1, 2, "bfloat16", one_target=True),
    Case("qwen3_moe", 2, 1, "bfloat16"),
    Case("qwen3", 2, 1, "float32", one_target=True),
    Case("qwen3_moe", 1, 2, "float32", one_target=True),
    Case("qwen3", 4, 1, "bfloat16"),
]
EXTENDED = CASES[:2]
WAITING = {
    "qwen3-2xTP1-drop passed on",
    "qwen3-2xTP1-reorder passed on",
    "qwen3_moe-1xTP2-reorder",
    "qwen3_moe-1xTP2-twice",
}
"""Tests of these cases with a draw that shows at the deadline only."""


@dataclass(frozen=True)
class Drawn:
    """A fault that was drawn. rank: None for one that passes a frame on; frame, bit: see `Fault`.

    bucket_bytes: of the link that follows it.
    """

    kind: str
    rank: int | None
    frame: int
    bit: int
    bucket_bytes: int


def faults_of(case):
    """One kill, every other kind, and more at random; some on frames that rollout ranks pass on."""
    generator = random.Random(f"faults of {case}")
    possible = [kind for kind in KINDS if kind != "astray" or not case.one_target]
    kinds = [*possible, *("passed on",) * 4]
    again = [kind for kind in possible if kind != "kill"]
    kinds += generator.choices(again, k=case.num_faults - len(kinds))
    generator.shuffle(kinds)
    for kind in kinds:
        frame, bit = generator.randrange(10**6), generator.randrange(10**9)
        rank = generator.randrange(NUM_TRAINER)
        if kind == "passed on":
            kind, rank = generator.choice(PASSED_ON), None
        yield Drawn(kind, rank, frame, bit, generator.choice(BUCKET_BYTES))


def drawn_tests():
    """Yield the case and the faults of each test: those of one kind."""
    for case in CASES:
        by_kind = {}
        for fault in faults_of(case):
            name = fault.kind if fault.rank is not None else f"{fault.kind} passed on"
            by_kind.setdefault(name, []).append(fault)
        for name, faults in by_kind.items():
            test = f"{case.name}-{name}"
            marks = () if case in EXTENDED else pytest.mark.slow(2)
            if test in WAITING:
                marks = pytest.mark.slow(21)
                if len(faults) > 1:
                    yield pytest.param(case, faults[:1], id=f"{test}-first")
                    faults = faults[1:]
            yield pytest.param(case, faults, id=test, marks=marks)


def test_there_are_two_hundred_faults_and_all_kinds():
    faults = [fault for param in drawn_tests() for fault in param.values[1]]
    count = Counter(fault.kind for fault in faults)
    assert len(faults) == 200
    assert count.keys() == set(KINDS) == set(WAYS)
    assert min(count.values()) == count["kill"] == len(CASES)
    assert sum(fault.rank is None for fault in faults) == 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sets of weights of each model."""
    made = {}
    for model in ("qwen3", "qwen3_moe"):
        paths = [tmp_path_factory.mktemp(f"{model}_{seed}") for seed in (1, 2)]
        made[model] = [
            make_tiny_model(model, path, tied=model == "qwen3", num_hidden_layers=2, seed=seed)
            for seed, path in enumerate(paths)
        ]
    return made


@pytest.fixture(scope="module")
def trainer(folders):
    trainer = FakeTrainer(folders["qwen3"][0], timeout_s=DEADLINE_S)
    yield trainer
    trainer.close()


class TransferSetup:
    """Trainer and rollout ranks of a case, link after link."""

    def __init__(self, case, trainer, folders):
        shape = ModelShape.from_folder(folders[0])
        layouts = [rollout_layout(shape, rank, case.tensor) for rank in range(case.tensor)]
        self.rollout_ranks = layouts * case.engines
        self.dtype = getattr(torch, case.dtype)
        self.folders = folders
        self.trainer = trainer
        trainer.use(folders[0], case.dtype)
        self.rollout = FakeRollout(self.rollout_ranks, self.dtype)
        self.version = 0
        self.is_linked = False
        tensors = [load_file(folder / "model.safetensors") for folder in folders]
        self.right = [[cut(layout, t) for layout in self.rollout_ranks] for t in tensors]

    def connect(self, bucket_bytes, fault=None):
        """Returns what the trainer ranks say."""
        session = self.trainer.connect(self.rollout_ranks, bucket_bytes=bucket_bytes, fault=fault)
        self.rollout.join(session)
        self.plan, self.bucket_bytes = session.plan, bucket_bytes
        return [a for a in self.trainer.results() if isinstance(a, Exception)]

    def transfer(self, fault=None):
        """Errors of all ranks, and regions that differ by rollout rank."""
        self.version += 1
        trainer_fault = fault if fault and fault.rank < NUM_TRAINER else None
        self.trainer.send(self.folders[self.version % 2], self.version, fault=trainer_fault)
        errors = self.rollout.receive(self.version, fault=None if trainer_fault else fault)
        if any(errors):
            self.rollout.leave()
        answers = self.trainer.results()
        errors = [e for e in [*errors, *answers] if isinstance(e, Exception)]
        if errors:
            return errors, {}
        wrong = self.rollout.find_mismatches(self.trainer.expected_digests(answers))
        return [], {NUM_TRAINER + sink: found for sink, found in enumerate(wrong) if found}

    def check_new_link(self, bucket_bytes):
        """Check that a transfer over a new link, with ranks that are alive, is right."""
        self.trainer.revive()
        assert not self.connect(bucket_bytes)
        assert self.transfer() == ([], {})
        for writer, right in zip(self.rollout.writers, self.right[self.version % 2], strict=True):
            assert writer.params.keys() == right.keys()
            for name, values in right.items():
                assert torch.equal(bits(writer.params[name]), bits(values.to(self.dtype))), name
        self.is_linked = True


def bits(values):
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


@pytest.fixture(scope="module")
def setup(request, trainer, folders):
    """The ranks of a case, for all its tests."""
    case = request.param
    setup = TransferSetup(case, trainer, folders[case.model])
    yield setup
    setup.rollout.close()


@pytest.mark.parametrize(("setup", "faults"), list(drawn_tests()), indirect=["setup"])
def test_every_fault_is_caught_and_named_and_the_next_transfer_is_right(setup, faults):
    if not setup.is_linked:
        setup.check_new_link(BUCKET_BYTES[0])
    for drawn in faults:
        rank = a_rank(setup.plan, drawn.kind, drawn.rank, drawn.frame)
        fault = Fault(kind=drawn.kind, rank=rank, frame=drawn.frame, bit=drawn.bit)
        setup.is_linked = False
        assert hit_by(fault, setup) in WAYS[fault.kind]
        setup.check_new_link(drawn.bucket_bytes)


def a_rank(plan, kind, rank, frame):
    """The rank that was drawn (None: one that passes something on), if the fault can hit it."""
    ranks = (
        plan.rollout_ranks
        if rank is None
        else [(rank + n) % NUM_TRAINER for n in range(NUM_TRAINER)]
    )
    able = [one for one in ranks if can_hit(kind, one, plan)]
    return able[frame % len(able)] if rank is None else able[0]


def hit_by(fault, setup):
    """How a fault showed; the link is broken afterwards."""
    plan = setup.plan
    if fault.kind in TOLD_FAULTS:
        if refused := setup.connect(setup.bucket_bytes, fault):
            check_refusal(fault, plan, setup.trainer.layouts[fault.rank], refused)
            return "join"
    errors, wrong = setup.transfer(fault)
    assert errors or wrong, f"{fault} was missed"
    messages = [str(error) for error in errors]
    if fault.kind == "kill":
        assert setup.trainer.processes[fault.rank].exitcode == 9
        # Whichever rank waits for it first names it, and need not be the frame's own receiver.
        names_it = f" could not receive from rank {fault.rank} "
        assert any(names_it in message for message in messages), messages
        return "gone"
    hit = setup.rollout.hit if fault.rank >= NUM_TRAINER else setup.trainer.hit
    assert hit is not None
    if errors:
        assert fault.kind not in (*CONTENT_FAULTS, "names")
        # Ranks wait for each other for ever if a bucket is dropped, or held back until the next is
        # sent, and the next goes to a rank that waits for the receiver. The same happens with a
        # bucket too many if its receiver waits for a rank that waits for its sender (two that pass
        # buckets on to each other, or three in a ring): then the sender names it.
        reasons = ["expected", *(["deadline"] if fault.kind in ("drop", "reorder") else [])]
        check_named(fault, hit, messages, reasons, sender_may=fault.kind == "twice")
        return "header"
    assert fault.kind in (*CONTENT_FAULTS, *TOLD_FAULTS)
    check_proof(fault, hit, setup.rollout, wrong)
    return "proof"


def check_refusal(fault, plan, layout, refused):
    """A rank that was told nonsense says so when it joins, and nobody else complains."""
    told_plan, told_layout = fault.spoil(fault.rank, plan, layout)
    right, told = (
        {piece for bucket in p.buckets for piece in bucket.slices}
        | {block for shard in shards for block in shard.blocks}
        for p, shards in ((plan, layout), (told_plan, told_layout))
    )
    suspects = {item.hf_name for item in right ^ told}
    (error,) = refused
    assert any(f"{name} Rect" in str(error) for name in suspects), (suspects, error)
    assert f"rank {fault.rank}" in str(error)


def check_named(fault, hit, messages, reasons, *, sender_may):
    """One of the ranks that were hit names itself and the sender, and the bucket with a reason.

    With `sender_may` it may also be the sender, which could not send in time.
    """
    for target in hit.targets:
        start = f"rank {target} could not receive from rank {fault.rank} "
        blocked = f"rank {fault.rank} could not send to rank {target} "
        for message in messages:
            if sender_may and blocked in message and named(hit, message) and "deadline" in message:
                return
            if start in message and named(hit, message) and any(r in message for r in reasons):
                return
    raise AssertionError(f"{fault} hit {hit}, but the messages are\n" + "\n".join(messages))


def named(hit, message):
    """As the bucket that was expected, with its first tensor, or as the one that came instead."""
    expected = any(f"bucket {bucket} (from " in message for bucket in hit.buckets)
    return (expected and any(f"(from {name} " in message for name in hit.names)) or any(
        f": bucket {bucket} arrived instead" in message for bucket in hit.buckets
    )


def check_proof(fault, hit, rollout, wrong):
    """Exactly the tensors that were hit, on the ranks that got them, with their source."""
    assert {region.hf_name for regions in wrong.values() for region in regions} == hit.names
    for target in hit.targets:
        assert {region.hf_name for region in wrong[target]} <= hit.names
        ways = [rollout.executors[target - NUM_TRAINER].sources_of(name) for name in hit.names]
        assert any(hit.buckets & set(way.get(fault.rank, ())) for way in ways)
