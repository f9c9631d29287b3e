"""Peak dense bfloat16 FLOP/s of GPUs, by the name that CUDA and NVML report.

The values are from NVIDIA's data sheets (which list twice as much with sparsity): A100 SXM and PCIe
312 TFLOP/s; H100 SXM 989, PCIe 756, NVL 835; H200 SXM 989, NVL 836; B200 HGX 2250. Runs on other
GPUs report no MFU.
"""

from __future__ import annotations

import re

_TERA = 1e12
_PEAK_FLOPS = (
    (re.compile(r"\bB200\b"), 2250 * _TERA),
    (re.compile(r"\bH200 NVL\b"), 836 * _TERA),
    (re.compile(r"\bH200\b"), 989 * _TERA),
    (re.compile(r"\bH100 NVL\b"), 835 * _TERA),
    (re.compile(r"\bH100 PCIe\b"), 756 * _TERA),
    (re.compile(r"\bH100\b"), 989 * _TERA),
    (re.compile(r"\bA100\b"), 312 * _TERA),
)
"""Patterns of GPU names with their peak FLOP/s; the first match counts."""

_MIG_SLICE = re.compile(r"\bMIG\b")


def peak_flops(gpu_name: str) -> float | None:
    """Return the peak FLOP/s of a GPU such as ``NVIDIA H100 80GB HBM3``, or None if unknown.

    The peak of a MIG slice is unknown.
    """
    if _MIG_SLICE.search(gpu_name):
        return None
    return next((peak for name, peak in _PEAK_FLOPS if name.search(gpu_name)), None)
