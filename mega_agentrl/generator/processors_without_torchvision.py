"""Lets vLLM load the processors of Qwen's vision-language models where torchvision is missing.

The engine cuts images into patches itself (`vision.processor`), so that vLLM processes none. It
still loads the model's processor at its start, for which transformers requires torchvision in two
places, although it has image processors that need PIL only:

* A processor has a video processor, and all of those need torchvision. `NoVideoProcessor` takes its
  place; it has the settings that vLLM reads and cannot process videos.
* vLLM imports `smart_resize` from the module of the image processor for torchvision. The module for
  PIL, which has the same function, takes its place.

Nothing is imported before a model needs it. Where torchvision is installed nothing changes.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Self

from transformers import processing_utils
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

_QWEN2_VL = "transformers.models.qwen2_vl"


class NoVideoProcessor(VideoProcessorMixin):
    """Video processor of a model that gets images only."""

    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}  # noqa: RUF012
    patch_size = 14
    temporal_patch_size = 2
    merge_size = 2
    fps = 2
    min_frames = 4
    max_frames = 768

    @classmethod
    def from_pretrained(cls, *_args: Any, **_options: Any) -> Self:
        """Return a processor; the files of the model are not read."""
        return cls()


class _PilModule(ModuleType):
    """Stand-in for the module of the image processor for torchvision."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{_QWEN2_VL}.image_processing_pil_qwen2_vl"), name)


def replace_torchvision_processors() -> None:
    """Put both replacements in place unless torchvision is installed; may be called twice."""
    if is_torchvision_available():
        return
    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin
    processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES["video_processor"] = (
        __name__,
        NoVideoProcessor.__name__,
    )
    name = f"{_QWEN2_VL}.image_processing_qwen2_vl"
    sys.modules.setdefault(name, _PilModule(name))
