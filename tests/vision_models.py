"""Tiny random vision-language checkpoints, written by transformers, with pictures for them.

    folder = make_vision_model("qwen2_5_vl", tmp_path / "model", num_hidden_layers=2)
    image = ImageProcessor(folder).load(ImageProcessor(folder).measure(make_picture(0, 56, 28)))

Text as in `tests.tiny_models`: hidden width 32 (64 in `qwen2_5_vl`, whose heads divide it), four
heads over two key/value heads of width 16, with rotary sections of 2, 3 and 3 frequencies. The
tower has two blocks of width 16, and patches of
14 pixels that are merged 2 x 2; `qwen3_vl` adds the features of its first block after the first
decoder layer (DeepStack). Token ids from 56 on are image, video, start and end of an image.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tiny_models import SIZES

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 56, 57, 58, 59
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "intermediate_size": 24,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "intermediate_size": 24,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}


def make_vision_model(
    name: str, folder: str | Path, *, tied: bool = False, seed: int = 7, **changes: Any
) -> Path:
    """Write the model `name`, one of `VISION_FAMILIES`, with its preprocessor_config.json.

    `changes` override keys of the text config, for example `num_hidden_layers=2`.
    """
    import transformers

    prefix = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[name]
    rope = _ROPE | ({"mrope_interleaved": True} if name == "qwen3_vl" else {})
    # transformers' Qwen2.5-VL takes the width of a head from these two, whatever head_dim says.
    width = SIZES["num_attention_heads"] * SIZES["head_dim"] if name == "qwen2_5_vl" else 32
    text = (
        SIZES
        | {"hidden_size": width, "rope_parameters": rope, "tie_word_embeddings": tied}
        | changes
    )
    tower = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "in_channels": 3,
        "out_hidden_size": text["hidden_size"], **_PATCHES, **_TOWERS[name],
    }  # fmt: skip
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=START_ID,
        vision_end_token_id=END_ID,
        tie_word_embeddings=tied,
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise + (1.0 if "norm" in key and parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    write_preprocessor_config(folder)
    return Path(folder)


def write_preprocessor_config(folder: str | Path, **changes: Any) -> None:
    """Write the settings of the images: 28 x 28 to 112 x 112 pixels."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 112 * 112,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings | changes))


def make_picture(seed: int, width: int = 56, height: int = 28) -> bytes:
    """Return a PNG file of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
