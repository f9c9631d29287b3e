"""Turns image files into what a vision tower reads, with the settings of a model folder.

Decoding and resizing happen once, in the rollout: `ImageProcessor.load` fills
`ImageInput.pixels_HWC`. Engine and policy cut the same resized pixels into patches (`patches`),
which is exact, so that both read the same numbers. transformers' processor for PIL normalises and
cuts them; the one for torchvision would resize differently.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_json
from mega_agentrl.types.images import ImageInput
from mega_agentrl.vision.loader import decode_rgb, shown_size

if TYPE_CHECKING:
    import numpy as np

_KEY, _EXPECTED = "model.path", "a file of a Hugging Face checkpoint of a vision-language model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """Special tokens of images, from a model's config.json."""

    image_id: int
    """Placeholder of one feature of an image."""
    video_id: int
    """Placeholder of one feature of a video, which this package does not write."""
    start_id: int
    """Token before the placeholders of an image."""
    end_id: int
    """Token after the placeholders of an image."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ImageTokens:
        """Read the ids from the config.json of a vision-language model."""
        config = read_json(Path(folder) / "config.json", _KEY, _EXPECTED)
        return cls(
            image_id=int(config["image_token_id"]),
            video_id=int(config["video_token_id"]),
            start_id=int(config["vision_start_token_id"]),
            end_id=int(config["vision_end_token_id"]),
        )

    @property
    def all_ids(self) -> tuple[int, ...]:
        """The ids that a policy must not sample."""
        return (self.image_id, self.video_id, self.start_id, self.end_id)

    def placeholder_ids(self, image: ImageInput) -> list[int]:
        """Return the tokens of an image: start, a placeholder for each feature, end."""
        return [self.start_id, *[self.image_id] * image.num_tokens, self.end_id]


def find_image_tokens(folder: str | Path) -> ImageTokens | None:
    """Return the image tokens of the model in a folder; None for a text model."""
    path = Path(folder) / "config.json"
    if not path.is_file() or read_json(path, _KEY, _EXPECTED).get("vision_config") is None:
        return None
    return ImageTokens.from_folder(folder)


class ImageProcessor:
    """Measures, resizes and cuts images as the model of a folder expects them.

    Args:
        folder: Model folder with preprocessor_config.json.
        min_pixels: Least number of pixels of a resized image; None for the model's own.
        max_pixels: Largest number of pixels of a resized image; None for the model's own.

    Raises:
        ConfigError: the folder has no such file, or the least number is above the largest.
    """

    def __init__(
        self, folder: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.folder = str(folder)
        settings = read_json(Path(folder) / "preprocessor_config.json", _KEY, _EXPECTED)
        size: dict[str, int] = dict(settings.pop("size", None) or {})
        bounds = settings.pop("min_pixels", None), settings.pop("max_pixels", None)
        least = min_pixels or bounds[0] or size.get("shortest_edge")
        largest = max_pixels or bounds[1] or size.get("longest_edge")
        known = set(Qwen2VLImageProcessorPil.valid_kwargs.__annotations__) | {
            "image_mean", "image_std", "rescale_factor", "resample",
        }  # fmt: skip
        self._processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": least, "longest_edge": largest} if least and largest else None,
            **{key: value for key, value in settings.items() if key in known - {"size"}},
        )
        self.min_pixels: int = self._processor.size["shortest_edge"]
        self.max_pixels: int = self._processor.size["longest_edge"]
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                "data.max_pixels",
                self.max_pixels,
                f"at least {self.min_pixels}, to which smaller images are enlarged",
                "only one of data.min_pixels and data.max_pixels was set, and the other is the "
                f"model's own ({folder}/preprocessor_config.json)",
                {"data.min_pixels": self.max_pixels},
            )
        self.merge_size: int = self._processor.merge_size
        self.patch_size: int = self._processor.patch_size

    def measure(
        self, data: bytes, *, path: str = "", size: tuple[int, int] | None = None
    ) -> ImageInput:
        """Return the record of an image file without decoding its pixels.

        Args:
            data: The bytes of the file, which `loader.check_image` has accepted.
            path: Path of the file; without it the record keeps the bytes.
            size: Width and height of the upright image, if the caller has read them.
        """
        width, height = size or shown_size(data)
        return ImageInput(
            image_id=self.image_id(data),
            path=path,
            data=b"" if path else data,
            width=width,
            height=height,
            grid_thw=self.grid(width, height),
            merge_size=self.merge_size,
        )

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the patches along time, height and width of an image with so many pixels."""
        rows, columns = self._resized_size(width, height)
        return 1, rows // self.patch_size, columns // self.patch_size

    def load(self, image: ImageInput) -> ImageInput:
        """Return the image with its resized pixels; the same pixels each time."""
        import numpy as np
        from PIL import Image

        if image.pixels_HWC is not None:
            return image
        decoded = decode_rgb(image.read())
        rows, columns = self._resized_size(*decoded.size)
        resized = decoded.resize((columns, rows), Image.Resampling.BICUBIC)
        return replace(image, pixels_HWC=np.asarray(resized, dtype=np.uint8))

    def patches(self, image: ImageInput) -> np.ndarray:
        """Return `[t * h * w, patch_dim]` float32, the normalised patches in the tower's order."""
        assert image.pixels_HWC is not None, f"{image!r} was not loaded"
        output: Any = self._processor(
            [image.pixels_HWC],
            do_resize=False,
            input_data_format="channels_last",
            return_tensors="np",
        )
        patches: np.ndarray = output["pixel_values"]
        return patches

    def _resized_size(self, width: int, height: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        rows, columns = smart_resize(
            height,
            width,
            factor=self.patch_size * self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        return rows, columns

    def image_id(self, data: bytes) -> str:
        """Return the hash of an image file and of the settings that it is resized with."""
        settings = f"{self.min_pixels},{self.max_pixels},{self.patch_size},{self.merge_size}"
        return hashlib.blake2b(data, digest_size=16, key=settings.encode()).hexdigest()
