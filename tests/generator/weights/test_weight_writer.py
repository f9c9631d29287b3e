"""Slices are written where the layout says, and a module is processed once it is complete."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from mega_agentrl.errors import InputError
from mega_agentrl.generator.weights.weight_writer import (
    MIN_STAGING_BYTES,
    ModuleWeightWriter,
    StagingBufferPool,
    force_expert_repack,
)
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.transfer_plan import ParamSlice
from mega_agentrl.reshard.verify.digest import compute_digests
from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests
from tests.reshard.fake_rollout import frame_of

ROWS, COLUMNS = 4, 3


def block(name, rows, at=0):
    rect = Rect((0, 0), (rows, COLUMNS))
    return Block(name, rect, Rect((at, 0), (at + rows, COLUMNS)))


LAYOUT = [
    # Two tensors of two rows over each other; one of three rows and one of padding; a vector.
    ShardLayout("fused.weight", (ROWS, COLUMNS), (block("a", 2), block("b", 2, at=2))),
    ShardLayout("padded.weight", (ROWS, COLUMNS), (block("c", 3),)),
    ShardLayout("norm.scale", (5,), (Block("d", Rect((0,), (5,)), Rect((0,), (5,))),)),
]
WHOLE = {
    ParamSlice(shard.name, one.local_rect): torch.arange(1.0, 1 + one.local_rect.numel).reshape(
        one.local_rect.shape
    )
    for shard in LAYOUT
    for one in shard.blocks
}


class Model(nn.Module):
    """Parameters as a loader wants them, full of a value that no slice has."""

    def __init__(self):
        super().__init__()
        for shard in LAYOUT:
            path, _, name = shard.name.partition(".")
            module = nn.Module()
            module.register_parameter(
                name, nn.Parameter(torch.full(shard.shape, -7.0), requires_grad=False)
            )
            self.add_module(path, module)


@pytest.fixture
def model():
    model = Model()
    record_metadata_for_reloading(model)
    return model


@pytest.fixture
def regions():
    return ReceivedDigests(LAYOUT, dict.fromkeys("abcd", "float32"))


def begun(model, regions, layout=LAYOUT):
    writer = ModuleWeightWriter(model, layout, regions)
    initialize_layerwise_reload(model)
    writer.begin_update()
    return writer


def write(writer, *param_slices, plus=0):
    writer.write(
        *frame_of({param_slice: WHOLE[param_slice] + plus for param_slice in param_slices})
    )


def params_and_digests():
    """What a complete update leaves."""
    params = {shard.name: torch.zeros(shard.shape) for shard in LAYOUT}
    for param_slice, values in WHOLE.items():
        params[param_slice.param][param_slice.rect.slices] = values
    blocks = [one for shard in LAYOUT for one in shard.blocks]
    return params, compute_digests(
        (values, one.hf_rect) for values, one in zip(WHOLE.values(), blocks, strict=True)
    )


def test_all_slices_are_written_and_padding_is_zero(model, regions):
    pointers_before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for _ in range(2):  # one update after another
        writer = begun(model, regions)
        write(writer, *reversed(WHOLE))
        writer.check_complete()
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
        params, expected = params_and_digests()
        assert regions.find_mismatches(expected) == []
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, params[name]), name
            assert parameter.data_ptr() == pointers_before[name]  # where CUDA graphs expect it


def test_a_module_has_memory_between_its_first_and_its_last_slice(model, regions):
    writer = begun(model, regions)
    param_slices = [param_slice for param_slice in WHOLE if param_slice.param == "fused.weight"]
    assert model.fused.weight.is_meta
    write(writer, param_slices[0])
    assert not model.fused.weight.is_meta
    assert model.padded.weight.is_meta
    write(writer, param_slices[1])
    assert model.fused.weight.tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6]]


def test_large_modules_arrive_one_after_another_in_the_same_memory():
    rows = MIN_STAGING_BYTES // (COLUMNS * 4) + 1
    rect = Rect((0, 0), (rows, COLUMNS))
    layout = [
        ShardLayout(f"{path}.weight", (rows, COLUMNS), (Block(name, rect, rect),))
        for path, name in (("first", "a"), ("second", "b"))
    ]
    half = Rect((0, 0), (rows // 2, COLUMNS)), Rect((rows // 2, 0), (rows, COLUMNS))
    model = nn.Module()
    for shard in layout:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(shard.shape), requires_grad=False)
        module.cpu_linear = object()  # what is packed
        model.add_module(shard.name.partition(".")[0], module)
    record_metadata_for_reloading(model)
    pointers_before = [parameter.data_ptr() for parameter in model.parameters()]
    writer = begun(model, ReceivedDigests(layout, dict.fromkeys("ab", "float32")), layout)
    assert not hasattr(model.first, "cpu_linear")
    addresses = []
    for module, shard in zip(model.children(), layout, strict=True):
        values = torch.rand(shard.shape)
        writer.write(*frame_of({ParamSlice(shard.name, half[0]): values[half[0].slices]}))
        addresses.append(module.weight.data_ptr())
        writer.write(*frame_of({ParamSlice(shard.name, half[1]): values[half[1].slices]}))
        assert torch.equal(module.weight, values)
    assert addresses[0] == addresses[1]
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers_before
    writer.check_complete()


def test_values_are_converted_to_the_dtype_of_the_parameter(regions):
    model = Model().to(torch.bfloat16)
    record_metadata_for_reloading(model)
    writer = begun(model, regions)
    (param_slice,) = [param_slice for param_slice in WHOLE if param_slice.param == "norm.scale"]
    writer.write(
        *frame_of({param_slice: torch.full((5,), 1.00390625)})
    )  # between two values of bfloat16
    assert model.norm.scale.dtype == torch.bfloat16
    assert model.norm.scale.tolist() == [1.0] * 5


def test_a_module_without_all_of_its_elements_is_named(model, regions):
    writer = begun(model, regions)
    write(writer, *list(WHOLE)[1:])
    with pytest.raises(InputError) as caught:
        writer.check_complete()
    assert caught.value.got == "fused (6), 1 modules in all"
    _, expected = params_and_digests()
    assert {region.hf_name for region in regions.find_mismatches(expected)} == {"a", "b"}


def test_a_slice_that_arrives_twice_is_named_and_changes_nothing(model, regions):
    writer = begun(model, regions)
    write(writer, *WHOLE)
    with pytest.raises(InputError) as caught:
        write(writer, next(iter(WHOLE)), plus=1)
    assert (caught.value.name, caught.value.got) == ("fused.weight", "6 elements")
    params, _ = params_and_digests()
    assert torch.equal(model.fused.weight, params["fused.weight"])


def test_a_complete_update_may_follow_one_that_was_given_up(model, regions):
    writer = begun(model, regions)
    write(writer, next(iter(WHOLE)))
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
    assert torch.equal(model.fused.weight, torch.full((ROWS, COLUMNS), -7.0))
    test_all_slices_are_written_and_padding_is_zero(model, regions)


@pytest.mark.parametrize(
    ("name", "shape", "got"),
    [("fused.weight", (ROWS + 1, COLUMNS), (4, 3)), ("norm.bias", (5,), None)],
    ids=["other-shape", "no-parameter"],
)
def test_another_shape_than_the_traced_one_is_refused(model, regions, name, shape, got):
    layout = [ShardLayout(name, shape, (block("a", 2),) if "fused" in name else ())]
    with pytest.raises(InputError) as caught:
        begun(model, regions, layout)
    assert (caught.value.name, caught.value.got) == (name, got)


def test_experts_are_packed_again_on_a_cpu_only():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    module.quant_method = SimpleNamespace(moe_kernel=object())
    force_expert_repack(module.to("meta"))
    assert module.quant_method.moe_kernel is not None
    module.weight = nn.Parameter(torch.zeros(2))
    force_expert_repack(module)
    assert module.quant_method.moe_kernel is None
    force_expert_repack(nn.Linear(2, 2))


def test_a_buffer_is_used_again_only_after_the_last_tensor_on_it_is_gone():
    pool = StagingBufferPool()
    weight, bias = pool.allocate([8192, 64])
    weight.fill_(1)
    values = torch.nn.Parameter(bias.fill_(2).view(torch.float32).detach()).data[:4]
    del weight, bias
    (other,) = pool.allocate([8192])
    other.fill_(3)
    assert values.view(torch.uint8).tolist() == [2] * 16
    at = values.untyped_storage().data_ptr()
    del values
    assert pool.allocate([8192])[0].data_ptr() == at


def test_parts_of_a_buffer_are_aligned_and_do_not_overlap():
    parts = StagingBufferPool().allocate([3, 64, 8, 1])
    starts = [part.data_ptr() for part in parts]
    assert [start - starts[0] for start in starts] == [0, 64, 128, 192]
    assert [part.numel() for part in parts] == [3, 64, 8, 1]
    parts[2].view(torch.float64).fill_(1.0)


def test_there_are_no_more_buffers_than_modules_in_progress():
    pool = StagingBufferPool()
    for size in (8192, 16384, 4096, 65536):  # a larger one takes the place of a smaller
        lent = pool.allocate([size])
        assert len(pool._free_buffers) == 0
        del lent
        assert len(pool._free_buffers) == 1
    assert [len(buffer) for buffer in pool._free_buffers] == [65536]
    pool.clear()
    assert pool._free_buffers == []
