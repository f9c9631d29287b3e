"""Summaries of GPUs between two calls, and the metrics of all GPUs of a run."""

import time

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.gpu.nvml_reader import open_nvml_reader
from mega_agentrl.report.gpu.sampler import GpuSampler, GpuSummary, aggregate_gpu_metrics
from tests.report.fake_nvml import FakeNvml, Gpu


class Script:
    """A reader that gives these readings of one GPU, then the last one for ever."""

    num_gpus = 1

    def __init__(self, *readings):
        self.readings, self.num_read, self.num_closed = readings, 0, 0

    def read(self):
        self.num_read += 1
        return [dict(self.readings[min(self.num_read, len(self.readings)) - 1])]

    def close(self):
        self.num_closed += 1


def until(condition):
    ends_at = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.005)


def test_a_summary_has_means_peaks_and_increases_of_counters():
    readings = [
        {"util": 0.0, "memory_gib": 9.0, "ecc_errors": 7.0},
        {"util": 0.5, "memory_gib": 11.0, "ecc_errors": 9.0},
        {"util": 1.0, "memory_gib": 10.0},
    ]
    reader = Script(*readings)
    sampler = GpuSampler(reader, interval_s=1000)
    for _ in readings[1:]:
        sampler._sample()
    (summary,) = sampler.collect()
    assert summary.index == 0
    assert summary.values == {"util": 0.5, "memory_gib": 11.0, "ecc_errors": 2.0}
    assert sampler.collect() == [], "nothing was read since then"
    sampler.close()
    sampler.close()
    assert reader.num_closed == 1


def test_counters_increase_since_the_last_summary_and_never_fall():
    sampler = GpuSampler(Script(*({"ecc_errors": n} for n in (1, 4, 6, 0, 2))), interval_s=1000)
    rises = []
    for _ in range(5):
        rises.append(sampler.collect()[0].values["ecc_errors"])
        sampler._sample()
    sampler.close()
    # The first reading counts as the beginning; a driver that was reset begins anew.
    assert rises == [0, 3, 2, 0, 2]


def test_the_gpus_are_read_in_the_background_until_the_sampler_is_closed():
    reader = Script({"util": 0.25}, {"util": 0.75})
    sampler = GpuSampler(reader, interval_s=0.01)
    try:
        until(lambda: reader.num_read >= 3)  # the second reading is in by then
        (summary,) = sampler.collect()
    finally:
        sampler.close()
    assert 0.25 < summary.values["util"] <= 0.75
    num_read = reader.num_read
    time.sleep(0.05)
    assert reader.num_read == num_read, "it reads after its end"


def test_the_sampler_works_over_a_reader_of_nvml():
    nvml = FakeNvml(Gpu(util=20), Gpu(util=40, links=(1,)))
    sampler = GpuSampler(open_nvml_reader(nvml))
    first, second = sampler.collect()
    sampler.close()
    assert (first.index, first.values["util"], second.values["util"]) == (0, 0.2, 0.4)
    assert second.values["nvlink_errors"] == 0
    assert nvml.num_open == 0


def gpu(index, **values):
    return GpuSummary(index=index, values=values)


def test_metrics_of_two_nodes_are_means_and_extremes_over_all_gpus():
    metrics = aggregate_gpu_metrics(
        {
            "10.0.0.1": [gpu(0, util=0.5, temperature_c=60.0), gpu(1, util=0.375, ecc_errors=0.0)],
            "10.0.0.2": [gpu(0, util=0.125, temperature_c=70.0), gpu(3, util=1.0, ecc_errors=2.0)],
        }
    )
    assert metrics == {
        "gpu/num_gpus": 4.0,
        "gpu/util/mean": 0.5,
        "gpu/util/min": 0.125,
        "gpu/util/max": 1.0,
        "gpu/util/worst": "10.0.0.2 GPU 0",
        "gpu/temperature_c/mean": 65.0,
        "gpu/temperature_c/min": 60.0,
        "gpu/temperature_c/max": 70.0,
        "gpu/temperature_c/worst": "10.0.0.2 GPU 0",
        "gpu/ecc_errors/sum": 2.0,
        "gpu/ecc_errors/worst": "10.0.0.2 GPU 3",
    }


def test_without_errors_no_gpu_is_named():
    metrics = aggregate_gpu_metrics({"a": [gpu(0, nvlink_errors=0.0)]})
    assert metrics == {"gpu/num_gpus": 1.0, "gpu/nvlink_errors/sum": 0.0}


def test_without_gpus_there_are_no_metrics():
    assert aggregate_gpu_metrics({}) == aggregate_gpu_metrics({"a": []}) == {}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_the_worst_one_has_the_least_use(utils):
    metrics = aggregate_gpu_metrics({"n": [gpu(i, util=util) for i, util in enumerate(utils)]})
    assert metrics["gpu/util/min"] == utils[int(metrics["gpu/util/worst"].split()[-1])]
    assert metrics["gpu/util/min"] <= metrics["gpu/util/max"] == max(utils)
