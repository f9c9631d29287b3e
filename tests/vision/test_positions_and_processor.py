"""Positions, placeholders and patches of images, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.types.images import PlacedImage, images_within
from mega_agentrl.vision.positions import rotary_positions
from mega_agentrl.vision.processor import ImageProcessor, ImageTokens
from tests.vision_models import (
    IMAGE_ID,
    VISION_FAMILIES,
    make_picture,
    make_vision_model,
    write_preprocessor_config,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {name: make_vision_model(name, root / name) for name in VISION_FAMILIES}


def test_an_image_has_positions_along_rows_and_columns() -> None:
    """Two text tokens, an image of 1 x 2 features, two text tokens."""
    processor = _processor_like(rows=2, columns=4)
    positions = rotary_positions(6, [PlacedImage(start=2, image=processor)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 4, 5],
        [0, 1, 2, 2, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_positions_equal_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    import transformers

    tokens = ImageTokens.from_folder(folders[name])
    processor = ImageProcessor(folders[name])
    ids, placed = [3, 4, 5], []
    for seed, size in enumerate(((56, 28), (112, 56), (28, 28))):
        image = processor.measure(make_picture(seed, *size))
        placed.append(PlacedImage(start=len(ids) + 1, image=image))
        ids += [*tokens.placeholder_ids(image), *range(seed + 1)]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folders[name])
    kinds = torch.tensor([[int(token == IMAGE_ID) for token in ids]], dtype=torch.int32)
    expected, _ = model.model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor([item.image.grid_thw for item in placed]),
    )
    assert rotary_positions(len(ids), placed).tolist() == expected[:, 0].tolist()
    prefix = rotary_positions(placed[1].start + 2, placed[:2])
    assert prefix.tolist() == expected[:, 0, : prefix.shape[1]].tolist()


def test_patches_of_loaded_pixels_equal_those_of_the_whole_processor(
    folders: dict[str, Path],
) -> None:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    data = make_picture(1, 97, 41)
    processor = ImageProcessor(folders["qwen2_5_vl"])
    image = processor.load(processor.measure(data))
    reference = Qwen2VLImageProcessorPil.from_pretrained(folders["qwen2_5_vl"])
    import io

    output = reference([Image.open(io.BytesIO(data))], return_tensors="np")
    assert image.grid_thw == tuple(output["image_grid_thw"][0])
    np.testing.assert_array_equal(processor.patches(image), output["pixel_values"])


@pytest.mark.parametrize(
    "setting", [{"max_pixels": 783}, {"min_pixels": 112 * 112 + 1}], ids=["max", "min"]
)
def test_bounds_must_not_exclude_each_other(setting: dict[str, int], tmp_path: Path) -> None:
    """The model's own are 28 x 28 and 112 x 112 pixels."""
    write_preprocessor_config(tmp_path)
    with pytest.raises(ConfigError) as caught:
        ImageProcessor(tmp_path, **setting)
    assert caught.value.key == "data.max_pixels"
    solved = setting | {"min_pixels": caught.value.solution["data.min_pixels"]}
    assert ImageProcessor(tmp_path, **solved).min_pixels == caught.value.got


def test_a_prefix_may_not_end_within_an_image() -> None:
    placed = PlacedImage(start=3, image=_processor_like(rows=4, columns=4))
    assert images_within([placed], 3) == ()
    assert images_within([placed], 7) == (placed,)
    with pytest.raises(ValueError):
        images_within([placed], 5)


def _processor_like(rows: int, columns: int):
    from mega_agentrl.types.images import ImageInput

    return ImageInput(
        image_id="x",
        width=14 * columns,
        height=14 * rows,
        grid_thw=(1, rows, columns),
        merge_size=2,
    )
