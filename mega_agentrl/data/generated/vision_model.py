"""The tiny vision-language model of a generated task, a random Qwen2.5-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from mega_agentrl.data.generated.tokenizer import IMAGE_TOKENS

TOWER_SIZES = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128}
PATCHES = {"patch_size": 14, "temporal_patch_size": 2}
MERGE_SIZE = 2
MAX_IMAGE_SIZE = 56
"""Larger pictures are reduced to about this width and height: four features of 28 x 28 pixels."""
_WINDOW_SIZE = 56
_HALF_HEAD_DIM = 16


def make_vision_model(
    text_config: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> Qwen2_5_VLForConditionalGeneration:
    """Return a model with random weights.

    Args:
        text_config: sizes of the language model, with heads of width 32.
        tokenizer: names the tokens of images (`IMAGE_TOKENS`).
    """
    # A third of the rotary frequencies each for height and width, the rest for time.
    spatial = 3 * _HALF_HEAD_DIM // 8
    sections = [_HALF_HEAD_DIM - 2 * spatial, spatial, spatial]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    image, video, start, end = (tokenizer.convert_tokens_to_ids(text) for text in IMAGE_TOKENS)
    config = Qwen2_5_VLConfig(
        text_config=text_config | {"rope_parameters": rope},
        vision_config={
            **TOWER_SIZES,
            **PATCHES,
            "spatial_merge_size": MERGE_SIZE,
            "in_channels": 3,
            "out_hidden_size": text_config["hidden_size"],
            "window_size": _WINDOW_SIZE,
            "fullatt_block_indexes": list(range(TOWER_SIZES["depth"])),
            "tokens_per_second": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_preprocessor_config(folder: Path) -> None:
    """Write the settings by which pictures are resized, normalised and cut into patches."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        **PATCHES,
        "merge_size": MERGE_SIZE,
        "min_pixels": (PATCHES["patch_size"] * MERGE_SIZE) ** 2,
        "max_pixels": MAX_IMAGE_SIZE**2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
