"""Peak bfloat16 operations a second of GPUs, dense, by the name CUDA and NVML give them.

From NVIDIA's data sheets, where the numbers with sparsity are twice these: A100 (SXM and PCIe)
312 TFLOPS; H100 SXM 989, PCIe 756, NVL 835; H200 SXM 989, NVL 836; B200 (HGX) 2250. A GPU that
is not listed has no peak here, and a run on it no MFU, rather than one that is made up.
"""

from __future__ import annotations

import re

_TERA = 1e12
_PEAKS = (
    (re.compile(r"\bB200\b"), 2250 * _TERA),
    (re.compile(r"\bH200 NVL\b"), 836 * _TERA),
    (re.compile(r"\bH200\b"), 989 * _TERA),
    (re.compile(r"\bH100 NVL\b"), 835 * _TERA),
    (re.compile(r"\bH100 PCIe\b"), 756 * _TERA),
    (re.compile(r"\bH100\b"), 989 * _TERA),
    (re.compile(r"\bA100\b"), 312 * _TERA),
)
"""The first that fits a name counts."""

_SLICE = re.compile(r"\bMIG\b")


def peak_flops(gpu_name: str) -> float | None:
    """Operations a second of the GPU of this name (``NVIDIA H100 80GB HBM3``); None: not known.

    A MIG slice is a part of a GPU and has none, either.
    """
    if _SLICE.search(gpu_name):
        return None
    return next((peak for name, peak in _PEAKS if name.search(gpu_name)), None)
