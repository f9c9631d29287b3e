"""Many GPUs, few metrics, and the name of the one to look at."""

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.gpu.metrics import aggregate_gpu_metrics
from mega_agentrl.report.gpu.sampler import GpuSummary


def gpu(index, **values):
    return GpuSummary(index=index, values=values)


def test_two_nodes_by_hand():
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


def test_without_errors_nobody_is_named():
    metrics = aggregate_gpu_metrics({"a": [gpu(0, nvlink_errors=0.0)]})
    assert metrics == {"gpu/num_gpus": 1.0, "gpu/nvlink_errors/sum": 0.0}


def test_without_gpus_there_is_nothing():
    assert aggregate_gpu_metrics({}) == aggregate_gpu_metrics({"a": []}) == {}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_the_worst_one_has_the_least_use(utils):
    metrics = aggregate_gpu_metrics({"n": [gpu(i, util=util) for i, util in enumerate(utils)]})
    assert metrics["gpu/util/min"] == utils[int(metrics["gpu/util/worst"].split()[-1])]
    assert metrics["gpu/util/min"] <= metrics["gpu/util/max"] == max(utils)
