"""Read the GPUs of this machine through NVML.

Quantities that a GPU, driver or permission does not provide (NVLink counters, ECC memory) are
absent from a reading and never end a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GIB = 2**30
GpuReading = dict[str, float]
"""By quantity: `util` (fraction of time with a running kernel), `memory_gib`, `power_w`,
`temperature_c`, and the cumulative counters `nvlink_errors` and `ecc_errors` (uncorrected)."""

COUNTERS = ("nvlink_errors", "ecc_errors")


class NvmlReader:
    """Reads all GPUs of the machine; created by `open_nvml_reader`.

    Args:
        nvml: the module `pynvml`, or a replacement with its functions.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return len(self._gpus)

    def names(self) -> list[str]:
        """Return the product name of each GPU."""
        return [str(self._nvml.nvmlDeviceGetName(gpu)) for gpu in self._gpus]

    def read(self) -> list[GpuReading]:
        """Return a reading of each GPU, in NVML's order."""
        return [self._read(gpu) for gpu in self._gpus]

    def close(self) -> None:
        """Shut NVML down."""
        self._gpus = []
        self._nvml.nvmlShutdown()

    def _read(self, gpu: Any) -> GpuReading:
        nvml = self._nvml
        readers: dict[str, Callable[[], float]] = {
            "util": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temperature_c": lambda: float(
                nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "nvlink_errors": lambda: float(self._nvlink_errors(gpu)),
            "ecc_errors": lambda: float(
                nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        }
        reading: GpuReading = {}
        for name, read_value in readers.items():
            try:
                reading[name] = read_value()
            except nvml.NVMLError:
                continue
        return reading

    def _nvlink_errors(self, gpu: Any) -> int:
        """Return replays, recoveries and CRC errors of all links; raises if the first link does."""
        nvml = self._nvml
        kinds = (
            nvml.NVML_NVLINK_ERROR_DL_REPLAY,
            nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
            nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
            nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
        )
        total = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                counts = [nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, kind) for kind in kinds]
            except nvml.NVMLError:
                if link:
                    break  # past the last link
                raise
            total += sum(counts)
        return total


def open_nvml_reader(nvml: Any = None) -> NvmlReader | None:
    """Return the reader of this machine, or None without a driver or a GPU.

    `nvml` replaces the package `pynvml`.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        reader = NvmlReader(nvml)
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None
    if not reader.num_gpus:
        reader.close()
        return None
    return reader
