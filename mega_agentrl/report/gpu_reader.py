"""What NVML says of the GPUs of this machine, one reading at a time.

Everything that a GPU, a driver or a permission does not give is absent from the reading: what
differs between GPUs (NVLink counters, ECC memory) must not end a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GIB = 2**30
Reading = dict[str, float]
"""By quantity: `util` (share of the time that a kernel ran), `memory_gib`, `power_w`,
`temperature_c`, and the counters `nvlink_errors` and `ecc_errors` (uncorrected), which only rise.
"""

COUNTERS = ("nvlink_errors", "ecc_errors")


class GpuReader:
    """All GPUs of the machine. nvml: the module `pynvml`, or what stands for it.

    Made by `open_reader`, which knows whether there is a driver.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

    @property
    def num_gpus(self) -> int:
        """How many there are."""
        return len(self._gpus)

    def read(self) -> list[Reading]:
        """One reading of each GPU, in NVML's order."""
        return [self._read(gpu) for gpu in self._gpus]

    def close(self) -> None:
        """Let the driver go."""
        self._gpus = []
        self._nvml.nvmlShutdown()

    def _read(self, gpu: Any) -> Reading:
        nvml = self._nvml
        ways: dict[str, Callable[[], float]] = {
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
        reading: Reading = {}
        for name, way in ways.items():
            try:
                reading[name] = way()
            except nvml.NVMLError:
                continue
        return reading

    def _nvlink_errors(self, gpu: Any) -> int:
        """Replays, recoveries and checksum errors of all links; raises as the first link does."""
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
                    break  # behind the last link
                raise
            total += sum(counts)
        return total


def open_reader(nvml: Any = None) -> GpuReader | None:
    """The reader of this machine; None, without a word, where there is no driver or no GPU.

    nvml: `pynvml` by default.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        reader = GpuReader(nvml)
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None
    if not reader.num_gpus:
        reader.close()
        return None
    return reader
