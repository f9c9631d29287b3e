"""Readings in our units, what a GPU lacks left out, silence without a driver."""

import inspect

import pynvml
import pytest

from mega_agentrl.report.gpu.nvml_reader import open_nvml_reader
from tests.report.fake_nvml import FakeNvml, Gpu


@pytest.mark.parametrize("name", [name for name in vars(FakeNvml) if name.startswith("nvml")])
def test_the_fake_has_the_signatures_of_the_real_library(name):
    ours = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
    assert ours == list(inspect.signature(getattr(pynvml, name)).parameters)


def test_a_reading_is_in_shares_gib_watts_and_degrees():
    nvml = FakeNvml(
        Gpu(util=75, used=3 * 2**29, power=412_500, temperature=61, links=(2, 3), ecc=4)
    )
    reader = open_nvml_reader(nvml)
    assert reader.num_gpus == 1
    assert reader.read() == [
        {
            "util": 0.75,
            "memory_gib": 1.5,
            "power_w": 412.5,
            "temperature_c": 61.0,
            "nvlink_errors": 5.0,
            "ecc_errors": 4.0,
        }
    ]
    reader.close()
    assert nvml.num_open == 0


def test_readings_that_a_gpu_lacks_are_left_out():
    reader = open_nvml_reader(FakeNvml(Gpu(util=10, lacks=("ecc", "power")), Gpu(links=(1,))))
    first, second = reader.read()
    assert first == {"util": 0.1, "memory_gib": 0.0, "temperature_c": 0.0}
    assert second["nvlink_errors"] == 1.0


@pytest.mark.parametrize("nvml", [FakeNvml(Gpu(), has_driver=False), FakeNvml()])
def test_without_a_driver_or_a_gpu_nothing_is_printed(nvml, capfd, caplog):
    assert open_nvml_reader(nvml) is None
    assert nvml.num_open == 0
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")


def test_the_real_library_agrees_with_this_machine(capfd):
    try:
        pynvml.nvmlInit()
        num_gpus = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        num_gpus = 0
    reader = open_nvml_reader()
    if not num_gpus:
        assert reader is None
    else:
        assert all(reading["memory_gib"] > 0 for reading in reader.read())
        assert reader.num_gpus == num_gpus
        reader.close()
    assert capfd.readouterr().err == ""
