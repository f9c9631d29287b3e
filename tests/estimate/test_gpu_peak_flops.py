"""Names as drivers give them, and those that have no peak."""

import pytest

from mega_agentrl.estimate.gpu_peak_flops import peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA B200", 2250),
    ],
)
def test_data_sheets(name, tera):
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["", "NVIDIA A10G", "NVIDIA GB10", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_others_have_none(name):
    assert peak_flops(name) is None
