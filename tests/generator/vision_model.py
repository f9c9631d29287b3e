"""Tiny vision-language folders that vLLM can serve, requests with images, and their recomputation.

The output layer prefers the tokens of images: about every other position has one as its most
probable token. The end of a text is improbable, so that requests reach their length.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from mega_agentrl.types.images import PlacedImage
from mega_agentrl.types.records import GenerateRequest
from mega_agentrl.vision.processor import ImageProcessor, ImageTokens
from tests.generator.tiny_model import EOS_ID, write_tokenizer
from tests.vision_models import END_ID, IMAGE_ID, START_ID, make_picture, make_vision_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.types.images import ImageInput
    from mega_agentrl.types.records import Generation

VOCAB_SIZE = 61
TOLERANCE = 1e-5
_PREFERENCE = 3.0
_DECODER_SCALE = 0.3
_FILE = "model.safetensors"
_numbers = count()


def write_vision_model(name: str, folder: Path, *, seed: int = 7, **changes: Any) -> Path:
    """Write a model of `tests.vision_models` with heads of the least width that vLLM can compute.

    Its tokenizer has a token a word, `w5` and so on.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    if name == "qwen3_vl":
        rope["mrope_interleaved"] = True
    sizes = {
        "hidden_size": 128,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    make_vision_model(name, folder, seed=seed, **(sizes | changes))
    weights = load_file(folder / _FILE)
    for key, value in weights.items():
        if "visual" not in key and value.ndim > 1:
            value.mul_(_DECODER_SCALE)  # as large as in a narrower decoder, for the same precision
    weights["lm_head.weight"][[IMAGE_ID, START_ID, END_ID]] *= _PREFERENCE
    weights["lm_head.weight"][EOS_ID] = 0.0
    save_file(weights, folder / _FILE, metadata={"format": "pt"})
    return write_tokenizer(folder, VOCAB_SIZE)


def write_with_another_tower(folder: Path, source: Path, seed: int = 1) -> Path:
    """Write the model of `source` with other weights in its vision tower, and only there."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / _FILE)
    generator = torch.Generator().manual_seed(seed)
    for key, value in weights.items():
        if "visual" in key and value.ndim > 1:
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    save_file(weights, folder / _FILE, metadata={"format": "pt"})
    return folder


def load_image(folder: Path, seed: int, width: int = 112, height: int = 56) -> ImageInput:
    """Return a random picture with its pixels."""
    processor = _processor(folder)
    return processor.load(processor.measure(make_picture(seed, width, height)))


def image_request(
    folder: Path, parts: Sequence[ImageInput | Sequence[int]], **settings: Any
) -> GenerateRequest:
    """Return a request for images and text in this order; other settings as keywords."""
    tokens, ids, images = ImageTokens.from_folder(folder), [], []
    for part in parts:
        if isinstance(part, (list, tuple, range)):
            ids += part
        else:
            images.append(PlacedImage(start=len(ids) + 1, image=part))
            ids += tokens.placeholder_ids(part)
    return GenerateRequest(
        **(
            {
                "request_id": f"image/{next(_numbers)}",
                "token_ids": tuple(ids),
                "images": tuple(images),
                "max_tokens": 12,
                "seed": 3,
            }
            | settings
        )
    )


@cache
def _processor(folder: Path) -> ImageProcessor:
    return ImageProcessor(folder)


@cache
def _loaded(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def image_logits_of(
    folder: Path, request: GenerateRequest, response: Sequence[int]
) -> torch.Tensor:
    """[T, V] float32 logits that predict each response token, by transformers."""
    ids = torch.tensor([[*request.token_ids, *response]])
    images: dict[str, torch.Tensor] = {}
    if request.images:
        cut = [_processor(folder).patches(placed.image) for placed in request.images]
        images = {
            "pixel_values": torch.cat([torch.from_numpy(patches) for patches in cut]),
            "image_grid_thw": torch.tensor([p.image.grid_thw for p in request.images]),
        }
    kinds = torch.zeros_like(ids)
    for placed in request.images:
        kinds[:, placed.start : placed.stop] = 1
    logits = _loaded(folder)(input_ids=ids, mm_token_type_ids=kinds, **images).logits
    return logits[0, len(request.token_ids) - 1 : -1].float()


def check_image_generation(folder: Path, request: GenerateRequest, got: Generation) -> None:
    """Log-probs, entropies and arg-max of every sampled token are those of transformers."""
    temperature = request.temperature or 1.0
    logits_TV = image_logits_of(folder, request, got.token_ids) / temperature
    logp_TV = logits_TV.log_softmax(-1)
    logp_T = logp_TV.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(torch.tensor(got.logps), logp_T, **close)
    torch.testing.assert_close(torch.tensor(got.entropies), entropy_T, **close)
    assert got.argmax_ids == tuple(logp_TV.argmax(-1).tolist())
