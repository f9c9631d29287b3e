"""Changes of settings are made on a copy and tried; those that are suggested make the run fit."""

from __future__ import annotations

import pytest

from mega_agentrl.config.enums import Recompute, TreeAttention
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.device import GIB, DeviceSpec
from mega_agentrl.estimate.preflight.suggestions import (
    engine_fits,
    get_setting,
    make_change,
    num_required_gpus,
    policy_peak_gib,
    suggest_engine_changes,
    suggest_policy_changes,
    valid_candidates,
    with_overrides,
)
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released

QWEN32, QWEN235 = "qwen3-32b", "qwen3-235b-a22b"


def suggestions(suggest, config, model, device=None):
    shape = released(model)
    return suggest(config, shape, device or DeviceSpec(), check_of(shape))


def test_a_change_leaves_the_configuration_alone():
    config = configured(tensor=2)
    other = with_overrides(config, {"parallel.tensor": 4, "engine.gpu_memory_utilization": 0.5})
    assert (get_setting(config, "parallel.tensor"), get_setting(other, "parallel.tensor")) == (2, 4)
    assert get_setting(other, "engine.gpu_memory_utilization") == 0.5
    assert other.engine.tensor_parallel_size == config.engine.tensor_parallel_size


def test_only_valid_changes_are_tried():
    def check(other):
        if other.parallel.tensor == 3:
            raise ValueError("3")

    candidates = [{"parallel.tensor": size} for size in (2, 3, 4)]
    found = valid_candidates(configured(tensor=2), candidates, check)
    assert [settings for settings, _ in found] == [candidates[2]]


def test_an_error_of_a_check_itself_is_raised():
    def check(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(valid_candidates(configured(), [{"parallel.tensor": 2}], check))


def test_a_change_names_new_values_and_more_gpus():
    config = configured(tensor=2, engines=3)
    change = make_change(
        config, {"parallel.tensor": 2, "parallel.data": 4, "parallel.sequence_parallel": True}, 7
    )
    assert change.num_extra_gpus == 6
    assert str(change) == (
        "parallel.data=4 (from 1) with parallel.sequence_parallel=true (from false): 7.0 GiB on 6 "
        "more GPUs"
    )
    assert num_required_gpus(config) == 2 + 3


LAYOUT = {"tensor": 8, "sequence_parallel": True, "data": 4}
POLICY_CASES = {
    "long micro-batches": (LAYOUT | {"tokens": 65536}, "optim.micro_batch_tokens"),
    "copied optimizer": (
        LAYOUT | {"distributed_optimizer": False},
        "parallel.distributed_optimizer",
    ),
    "no sharing": ({"tokens": 12288, "tensor": 8, "data": 4}, "parallel.sequence_parallel"),
    "long rows": (
        {"tokens": 32768, "response": 30720, "tensor": 8, "pipeline": 4, "sequence_parallel": True},
        "parallel.recompute",
    ),
    "too few ranks": ({"tensor": 4, "sequence_parallel": True}, None),
}


@pytest.mark.parametrize("name", POLICY_CASES)
def test_every_policy_change_fits_and_the_nearest_comes_first(name):
    layout, nearest_key = POLICY_CASES[name]
    config, shape, device = configured(**layout), released(QWEN32), DeviceSpec()
    room = device.usable_bytes / GIB
    assert policy_peak_gib(config, shape, device) > room
    changes = suggestions(suggest_policy_changes, config, QWEN32)
    for change in changes:
        peak = policy_peak_gib(with_overrides(config, change.new_values), shape, device)
        assert peak == change.peak_gib <= room
    sizes = [(max(0, change.num_extra_gpus), len(change.new_values)) for change in changes]
    assert sizes and sizes == sorted(sizes)
    if nearest_key is not None:
        assert list(changes[0].new_values) == [nearest_key]
        assert changes[0].num_extra_gpus == 0


def test_the_micro_batch_is_the_largest_that_fits():
    config = configured(**POLICY_CASES["long micro-batches"][0])
    first = suggestions(suggest_policy_changes, config, QWEN32)[0]
    tokens = first.new_values["optim.micro_batch_tokens"]
    assert tokens % 128 == 0
    more = with_overrides(config, {"optim.micro_batch_tokens": tokens + 256})
    assert policy_peak_gib(more, released(QWEN32), DeviceSpec()) > DeviceSpec().usable_bytes / GIB


@pytest.mark.extended
def test_experts_go_over_more_ranks():
    config = configured(tokens=4096, response=2048, data=8)
    config.parallel = ParallelConfig(
        tensor=4, sequence_parallel=True, context=4, data=8, pipeline=2, expert=2
    )
    first = suggestions(suggest_policy_changes, config, QWEN235)[0]
    assert list(first.new_values) == ["parallel.expert"]


def test_a_change_that_the_check_refuses_is_not_suggested():
    def check(config):
        if config.parallel != layout:
            raise ValueError("fixed")

    config = configured(**POLICY_CASES["no sharing"][0])
    layout = config.parallel
    assert suggest_policy_changes(config, released(QWEN32), DeviceSpec(), check) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"engine.gpu_memory_utilization": 0.98},
        {"engine.gpu_memory_utilization": 0.2},
        {"engine.gpu_memory_utilization": 0.75, "engine.tensor_parallel_size": 1},
        {"weight_sync.bucket_mib": 8192},
    ],
    ids=["large share", "small share", "large weights", "large buckets"],
)
def test_every_engine_change_fits_and_the_nearest_comes_first(settings):
    good, shape, device = configured(engine=4, engines=8), released(QWEN32), DeviceSpec()
    config = with_overrides(good, settings)
    assert engine_fits(good, shape, device) and not engine_fits(config, shape, device)
    changes = suggestions(suggest_engine_changes, config, QWEN32)
    assert list(changes[0].new_values) == ["engine.gpu_memory_utilization"]
    for change in changes:
        assert engine_fits(with_overrides(config, change.new_values), shape, device)
    assert changes[0].num_extra_gpus == 0


def test_tensor_ranks_are_taken_from_the_number_of_engines():
    config = configured(engine=4, engines=64)
    first = suggestions(suggest_engine_changes, config, QWEN235)[0]
    assert first.new_values == {"engine.tensor_parallel_size": 8, "cluster.num_engines": 32}
    assert first.num_extra_gpus == 0


def test_nothing_is_suggested_for_a_gpu_that_is_far_too_small():
    device = DeviceSpec(memory_gib=8)
    assert suggestions(suggest_engine_changes, configured(), QWEN235, device) == []


def test_flat_rows_are_suggested_where_the_keys_of_large_groups_do_not_fit():
    config = configured(tensor=4, sequence_parallel=True)
    config.rollout.group_size, config.parallel.recompute = 128, Recompute.full
    config.model.tree_attention = TreeAttention.gather
    shape, flat = released("qwen2.5-7b"), with_overrides(config, {"batch.trees": False})
    flat_gib = policy_peak_gib(flat, shape, DeviceSpec())
    device = DeviceSpec(memory_gib=flat_gib + 1, reserved_fraction=0.0)
    assert policy_peak_gib(config, shape, device) > flat_gib + 1
    found = suggestions(suggest_policy_changes, config, "qwen2.5-7b", device)
    assert {"batch.trees": False} in [change.new_values for change in found]
