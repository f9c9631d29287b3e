"""Memory and data types of a device."""

from __future__ import annotations

import pytest

from mega_agentrl.config.enums import Dtype
from mega_agentrl.errors import InputError
from mega_agentrl.estimate.device import GIB, DeviceSpec


def test_a_gpu_keeps_a_reserve_and_a_cpu_has_no_bound():
    assert DeviceSpec(memory_gib=80, reserved_fraction=0.05).usable_bytes == 76 * GIB
    assert DeviceSpec(memory_gib=None).usable_bytes == float("inf")


def test_types_follow_the_device_unless_one_is_named():
    gpu, cpu = DeviceSpec(), DeviceSpec(memory_gib=None)
    assert [device.item_bytes(Dtype.auto) for device in (gpu, cpu)] == [2, 4]
    assert [device.item_bytes(Dtype.float32) for device in (gpu, cpu)] == [4, 4]
    assert [device.item_bytes(Dtype.bfloat16) for device in (gpu, cpu)] == [2, 2]


@pytest.mark.parametrize(
    "wrong", [{"memory_gib": 0}, {"gpus_per_node": 0}, {"reserved_fraction": 1.0}]
)
def test_impossible_devices_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InputError) as caught:
        DeviceSpec(**wrong)
    assert (caught.value.name, caught.value.got) == (name, value)
