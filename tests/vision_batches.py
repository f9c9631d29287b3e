"""A batch of rollout trees with images in prompts and in tools' answers, and its reference.

Three trees. The first prompt shows picture A; its rows share the response `a`, after which two of
them share a tool's answer with picture B and fork behind it, and the third has an answer of its own
with picture C. The second tree has no image. The third prompt shows picture A again, and then B::

    question A -- a -- zoom B -- b
                    |         `- c
                    `- zoom C -- d
    text       -- e
    question A B -- f

The reference is transformers in float32, one row at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from mega_agentrl.batch.tree_order import order_rows
from mega_agentrl.types.batch import TrainBatch
from mega_agentrl.types.images import PlacedImage
from mega_agentrl.vision.processor import ImageProcessor, ImageTokens
from tests.vision_models import make_picture

SIZES = {"A": (56, 28), "B": (84, 84), "C": (28, 56)}
"""Width and height of each picture in pixels."""
SEGMENTS = {
    "question A": (3, "A", 2), "question A B": (1, "A", 2, "B", 1), "text": (4,),
    "zoom B": (1, "B", 2), "zoom C": ("C", 1),
    "a": (4,), "b": (3,), "c": (5,), "d": (2,), "e": (6,), "f": (3,),
}  # fmt: skip
"""Numbers of text tokens, and pictures."""
ROWS = (
    ("question A", "a", "zoom B", "b"),
    ("question A", "a", "zoom B", "c"),
    ("question A", "a", "zoom C", "d"),
    ("text", "e"),
    ("question A B", "f"),
)
"""Segments of each row; the first is the prompt."""


def load_pictures(folder) -> dict[str, Any]:
    """Return the loaded pictures by name."""
    processor = ImageProcessor(folder)
    return {
        name: processor.load(processor.measure(make_picture(ord(name), *size)))
        for name, size in SIZES.items()
    }


def make_vision_batch(folder, *, seed: int = 3) -> TrainBatch:
    """Return the batch for a tiny model, in depth-first order; advantages differ by row."""
    generator = torch.Generator().manual_seed(seed)
    pictures, special = load_pictures(folder), ImageTokens.from_folder(folder)
    contents, first_id = {}, 0
    # In the order of the rows, so that they are in depth-first order.
    for name in dict.fromkeys(name for row in ROWS for name in row):
        contents[name] = _make_segment(SEGMENTS[name], pictures, special, generator, first_id)
        first_id += len(contents[name][0])
    rows = [[contents[name] for name in names] for names in ROWS]
    lengths = [sum(len(tokens) for tokens, *_ in row[1:]) for row in rows]
    width = max(lengths)
    response_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    images = []
    for number, (names, row) in enumerate(zip(ROWS, rows, strict=True)):
        tokens = [token for part, *_ in row[1:] for token in part]
        response_BT[number, : len(tokens)] = torch.tensor(tokens)
        trained = [
            len(name) == 1 for name, (part, *_) in zip(names, row, strict=True) for _ in part
        ]
        mask_BT[number, : len(tokens)] = torch.tensor(trained[len(row[0][0]) :])
        starts = [sum(len(part) for part, *_ in row[:index]) for index in range(len(row))]
        images.append(
            tuple(
                placed.shifted(start)
                for start, (*_, part) in zip(starts, row, strict=True)
                for placed in part
            )
        )
    order, shared = order_rows([[i for _, ids, _ in row for i in ids] for row in rows])
    zeros = torch.zeros(len(rows), width)
    noise_BT = torch.randn(len(rows), width, generator=generator)
    return TrainBatch(
        prompt_ids=tuple(tuple(row[0][0]) for row in rows),
        response_BT=response_BT,
        length_B=torch.tensor(lengths),
        mask_BT=mask_BT,
        group_B=torch.tensor([0, 0, 0, 1, 2]),
        reward_B=torch.zeros(len(rows)),
        tree_token_BT=torch.zeros(len(rows), width, dtype=torch.int64),
        rollout_logp_BT=zeros,
        rollout_entropy_BT=zeros,
        version_BT=torch.zeros(len(rows), width, dtype=torch.int64),
        old_logp_BT=-4.0 + 0.3 * noise_BT,
        advantage_BT=torch.randn(len(rows), 1, generator=generator).expand(-1, width).clone(),
        tree_order_B=torch.tensor(order),
        shared_length_B=torch.tensor(shared),
        images_B=tuple(images),
    ).validate()


def without_images(batch: TrainBatch) -> TrainBatch:
    """Return the batch with text in place of all special tokens of images."""
    return batch.with_fields(
        prompt_ids=tuple(tuple(token % 50 for token in row) for row in batch.prompt_ids),
        response_BT=batch.response_BT % 50,
        images_B=None,
    )


def load_vision_model(folder) -> Any:
    """Load the folder's model in float32."""
    import transformers

    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )


def score_rows(network, folder, batch: TrainBatch) -> torch.Tensor:
    """Return `[B, T]` log-probs of the response tokens by transformers, with gradients."""
    processor, special = ImageProcessor(folder), ImageTokens.from_folder(folder)
    logp_BT = torch.zeros(batch.response_BT.shape)
    for row, prompt in enumerate(batch.prompt_ids):
        length = int(batch.length_B[row])
        response_L = batch.response_BT[row, :length]
        token_L = torch.cat([torch.tensor(prompt), response_L])[None]
        images = [placed.image for placed in batch.images_B[row]] if batch.images_B else []
        inputs = {}
        if images:
            patches = [torch.from_numpy(processor.patches(image)) for image in images]
            inputs = {
                "pixel_values": torch.cat(patches),
                "image_grid_thw": torch.tensor([image.grid_thw for image in images]),
                "mm_token_type_ids": (token_L == special.image_id).int(),
            }
        logits = network(input_ids=token_L, **inputs).logits[0, len(prompt) - 1 : -1]
        logp_BT[row, :length] = logits.log_softmax(-1).gather(1, response_L[:, None])[:, 0]
    return logp_BT


def stored_gradients(network) -> dict[str, torch.Tensor]:
    """Return the gradients under the names of the saved checkpoint."""
    is_qwen3 = network.config.model_type == "qwen3_vl"
    found = {}
    for name, parameter in network.named_parameters():
        if not is_qwen3:
            name = name.replace("model.language_model.", "model.")
            name = name.replace("model.visual.", "visual.")
        found[name] = parameter.grad
    return found


def _make_segment(parts, pictures, special, generator, first_id):
    """Return tokens, identities of the tokens, and images with starts in the segment."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, str):
            images.append(PlacedImage(start=len(tokens) + 1, image=pictures[part]))
            tokens += special.placeholder_ids(pictures[part])
        else:
            tokens += torch.randint(0, 50, (part,), generator=generator).tolist()
    return tokens, list(range(first_id, first_id + len(tokens))), images
