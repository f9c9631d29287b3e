"""A fake `pynvml` with the names, arguments and units of the real functions."""

from types import SimpleNamespace

import pynvml


class Gpu:
    """util: percent. power: milliwatts. errors: of each link. Functions in `lacks` are refused."""

    def __init__(self, util=0, used=0, power=0, temperature=0, links=(), ecc=0, lacks=()):
        self.util, self.used, self.power, self.temperature = util, used, power, temperature
        self.links, self.ecc, self.lacks = list(links), ecc, lacks


class FakeNvml:
    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = pynvml.NVML_VOLATILE_ECC
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_NVLINK_ERROR_DL_REPLAY = pynvml.NVML_NVLINK_ERROR_DL_REPLAY
    NVML_NVLINK_ERROR_DL_RECOVERY = pynvml.NVML_NVLINK_ERROR_DL_RECOVERY
    NVML_NVLINK_ERROR_DL_CRC_FLIT = pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT
    NVML_NVLINK_ERROR_DL_CRC_DATA = pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA

    def __init__(self, *gpus, has_driver=True):
        self.gpu, self.has_driver, self.num_open = list(gpus), has_driver, 0

    def nvmlInit(self):
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpu)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpu[index]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._of(handle, "util"), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return SimpleNamespace(used=self._of(handle, "used"), total=80 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._of(handle, "power")

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._of(handle, "temperature")

    def nvmlDeviceGetNvLinkErrorCounter(self, device, link, counter):
        links = self._of(device, "links")
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return links[link] if counter == self.NVML_NVLINK_ERROR_DL_REPLAY else 0

    def nvmlDeviceGetTotalEccErrors(self, handle, errorType, counterType):
        assert errorType == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        assert counterType == self.NVML_VOLATILE_ECC
        return self._of(handle, "ecc")

    @staticmethod
    def _of(gpu, name):
        if name in gpu.lacks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return getattr(gpu, name)
