"""Images of a vision-language model, and where they stand in a sequence of tokens.

An image takes part in a sequence through a run of placeholder tokens (`<|image_pad|>`), one for
each feature that the vision tower computes from it. Records refer to an image by the hash of its
file; the file is decoded and resized once, when the first request needs it, and the engine and the
policy read the same resized pixels.

Example: a prompt with an image of 28 x 56 pixels, patches of 14 pixels, merged 2 x 2::

    <|vision_start|> <|image_pad|> <|image_pad|> <|vision_end|> What is this?
    index                1             2
    PlacedImage(start=1, image=ImageInput(grid_thw=(1, 2, 4), merge_size=2, ...))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np  # at run time, because msgspec evaluates the annotations of records

from mega_agentrl.errors import InputError


@dataclass(slots=True, weakref_slot=True, kw_only=True, frozen=True, eq=False)
class ImageInput:
    """An image as a vision-language model reads it; two are equal if their ids are."""

    image_id: str
    """Hash of the file's bytes and of the settings that it is resized with."""
    path: str = ""
    """File of the image; empty if `data` has its bytes."""
    data: bytes = b""
    """Bytes of the image file, for an image that a tool has made."""
    width: int
    """Width of the file's image in pixels, upright and before it is resized."""
    height: int
    """Height of the file's image in pixels, upright and before it is resized."""
    grid_thw: tuple[int, int, int]
    """Number of patches of the resized image along time, height and width."""
    merge_size: int
    """The tower merges this many patches along height and along width into one feature."""
    pixels_HWC: np.ndarray | None = None
    """[H, W, 3] uint8 resized image; None until `vision.processor.ImageProcessor.load`."""

    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens, one for each feature."""
        frames, rows, columns = self.grid_thw
        return frames * (rows // self.merge_size) * (columns // self.merge_size)

    @property
    def num_positions(self) -> int:
        """Number of positions that the image takes of the rotary embedding.

        The token after the image stands that many positions after the image's first token.
        """
        return max(self.grid_thw[1:]) // self.merge_size

    def read(self) -> bytes:
        """Return the bytes of the image file."""
        return self.data or Path(self.path).read_bytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageInput) and self.image_id == other.image_id

    def __hash__(self) -> int:
        return hash(self.image_id)

    def __repr__(self) -> str:
        """Return id and sizes, without the pixels."""
        return (
            f"<ImageInput {self.image_id}: {self.width} x {self.height}, {self.num_tokens} tokens>"
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class PlacedImage:
    """An image in a sequence of tokens."""

    start: int
    """Index of its first placeholder token in the sequence."""
    image: ImageInput

    @property
    def stop(self) -> int:
        """One past the index of its last placeholder token."""
        return self.start + self.image.num_tokens

    def shifted(self, offset: int) -> PlacedImage:
        """Return the image `offset` tokens later."""
        return replace(self, start=self.start + offset)


def images_within(images: Sequence[PlacedImage], num_tokens: int) -> tuple[PlacedImage, ...]:
    """Return the images among the first `num_tokens` tokens.

    Raises:
        ValueError: the prefix ends within an image.
    """
    inside = tuple(placed for placed in images if placed.start < num_tokens)
    if inside and inside[-1].stop > num_tokens:
        last = inside[-1]
        placeholders = f"{last.start}..{last.stop - 1} of image {last.image.image_id}"
        expected = f"whole images; it ends within the placeholders {placeholders}"
        cause = "a fork or a cut at a wrong token"
        raise InputError("tokens of a prefix", num_tokens, expected, cause)
    return inside
