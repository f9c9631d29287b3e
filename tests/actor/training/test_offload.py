"""State moved to host memory and back: memory is freed and no value changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.actor.training.offload import ALL_STATE, HostBuffer, Offloader, ReferenceWeights
from mega_agentrl.errors import InputError
from tests.actor.training.optimizer_jobs import build, weights_of
from tests.actor.training.small_model import wrap

KINDS = [(d, o) for d in (torch.float32, torch.bfloat16) for o in (False, True)]


@pytest.fixture(params=KINDS, ids=["float32", "float32-distributed", "bf16", "bf16-distributed"])
def trained(request, one_rank):
    """Return (offloader, optimizer, chunk, step function) after one step, and a twin of them."""
    return *make(one_rank, *request.param), lambda: make(one_rank, *request.param)


def make(groups, dtype, distributed):
    chunk, optimizer, step = build(groups, dtype, distributed, experts=True)
    step(0)
    return Offloader([chunk], optimizer), optimizer, chunk, step


def storages(optimizer, chunk):
    """Return the storage sizes of each part; masters that are weights count as weights."""
    weights = [p.untyped_storage() for p in chunk.module.parameters()]
    buffers = chunk.buffers + chunk.expert_parallel_buffers
    known = {storage._cdata for storage in weights}
    state = [t.untyped_storage() for t in optimizer.state_tensors()]
    return {
        "weights": {s.nbytes() for s in weights},
        "gradients": {b.grad_data.untyped_storage().nbytes() for b in buffers},
        "optimizer": {s.nbytes() for s in state if s._cdata not in known},
    }


def test_memory_is_freed_and_the_next_steps_are_those_without_offload(trained):
    offload, optimizer, chunk, step, build_twin = trained
    before = weights_of(chunk)
    state = [tensor.detach().clone() for tensor in optimizer.state_tensors()]
    offload.to_host()
    assert offload.on_host == ALL_STATE
    assert storages(optimizer, chunk) == {name: {0} for name in ALL_STATE}
    offload.to_device()
    assert not offload.on_host
    assert all(torch.equal(value, before[name]) for name, value in weights_of(chunk).items())
    pairs = zip(optimizer.state_tensors(), state, strict=True)
    assert all(torch.equal(now, then) for now, then in pairs)
    *_, twin, step_twin = build_twin()
    for number in (1, 2):
        step(number)
        step_twin(number)
    after = weights_of(chunk)
    assert all(torch.equal(value, after[name]) for name, value in weights_of(twin).items())


def test_views_into_the_buffers_stay_views(trained):
    offload, _, chunk, *_ = trained
    offload.to_host()
    offload.to_device()
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        assert not buffer.grad_data.any()
        buffer.grad_data.fill_(3.0)
        if buffer.param_data is not None:
            buffer.param_data.fill_(2.0)
    for parameter in chunk.module.parameters():
        assert (parameter.main_grad == 3.0).all()
        if chunk.ddp_config.use_distributed_optimizer:
            assert (parameter == 2.0).all()


def missing_for(call, *arguments):
    """Return the operation that refuses a call, and the parts that are in host memory."""
    with pytest.raises(InputError) as caught:
        call(*arguments)
    operation, _, state = caught.value.name.partition(": ")
    assert state == "parts in host memory"
    return operation, caught.value.got


@pytest.mark.parametrize("part", sorted(ALL_STATE))
def test_one_part_leaves_the_others_where_they_are(trained, part):
    offload, optimizer, chunk, step, _ = trained
    before, here = weights_of(chunk), storages(optimizer, chunk)
    offload.to_host(**{name: name == part for name in ALL_STATE})
    assert offload.on_host == {part}
    assert storages(optimizer, chunk) == {**here, part: {0}}
    assert missing_for(optimizer.step, 0.05) == ("step", [part])
    # The rest follows and comes back alone.
    offload.to_host()
    offload.to_device(**{name: name != part for name in ALL_STATE})
    assert offload.on_host == {part}
    offload.to_device()
    assert storages(optimizer, chunk) == here
    assert all(torch.equal(value, before[name]) for name, value in weights_of(chunk).items())
    step(1)


def test_a_pass_or_step_without_a_part_that_it_needs_is_refused(trained):
    offload, optimizer, chunk, *_ = trained
    offload.to_host(weights=False)
    with torch.no_grad():
        assert chunk.module().item() > 0
    assert missing_for(chunk.module) == ("forward pass", ["gradients"])
    offload.to_host()
    with torch.no_grad():
        assert missing_for(chunk.module) == ("forward pass", ["weights"])
    for call in (optimizer.zero_grad, optimizer.reset, optimizer.reload_master_weights):
        assert missing_for(call)[1]
    operation, missing = missing_for(lambda: list(optimizer.state_shards()))
    assert (operation, missing) == ("state_shards", ["optimizer", "weights"])


@given(
    sizes=st.lists(st.integers(0, 50), max_size=6),
    block_bytes=st.sampled_from([1, 8, 64, 1 << 20]),
)
def test_every_byte_is_restored_with_any_block_size(sizes, block_bytes):
    tensors = [torch.arange(size, dtype=torch.int16) + 7 * i for i, size in enumerate(sizes)]
    expected = [tensor.clone() for tensor in tensors]
    halves = [tensor[tensor.numel() // 2 :] for tensor in tensors]
    store = HostBuffer(block_bytes)
    for _ in range(2):
        store.offload([*tensors, *halves])
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        store.restore()
        assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))
        assert all(
            torch.equal(h, e[e.numel() // 2 :]) for h, e in zip(halves, expected, strict=True)
        )


def test_frozen_weights_have_no_optimizer(one_rank):
    chunk = wrap(one_rank, distributed=True, frozen=True)
    offload, before = Offloader([chunk], None), weights_of(chunk)
    offload.to_host()
    assert {p.untyped_storage().nbytes() for p in chunk.module.parameters()} == {0}
    with torch.no_grad():
        assert missing_for(chunk.module) == ("forward pass", ["weights"])
    offload.to_device()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(chunk).items())


def weights():
    """Return parameters that are views of one buffer, as in Megatron, and a bfloat16 one."""
    buffer = torch.arange(27.0)
    parts = buffer.split([15, 7, 4, 1])
    views = [
        part.view(size) for part, size in zip(parts, ((3, 5), (7,), (2, 2), (1,)), strict=True)
    ]
    return buffer, [*map(torch.nn.Parameter, views), torch.nn.Parameter(torch.ones(3).bfloat16())]


@pytest.mark.parametrize("block_bytes", [8, 24, 64, 2**20])
def test_reference_weights_are_swapped_in_inside_the_context_only(block_bytes):
    buffer, parameters = weights()
    reference = ReferenceWeights(parameters, block_bytes=block_bytes)
    addresses = [parameter.data_ptr() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(-1).sub_(0.5)
    trained = [parameter.detach().clone() for parameter in parameters]
    for _ in range(2):
        with reference.swapped_in():
            assert buffer.tolist() == list(range(27))
            assert parameters[-1].tolist() == [1, 1, 1]
        assert all(map(torch.equal, parameters, trained))
    assert [parameter.data_ptr() for parameter in parameters] == addresses


def test_a_failing_pass_leaves_the_present_weights():
    buffer, parameters = weights()
    reference = ReferenceWeights(parameters)
    buffer.add_(1)
    with pytest.raises(ZeroDivisionError), reference.swapped_in():
        raise ZeroDivisionError
    assert buffer.tolist() == list(range(1, 28))
