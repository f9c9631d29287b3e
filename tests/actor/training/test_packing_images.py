"""Images of packed rows: positions, places, context ranks and parts of the tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.types.images import ImageInput, PlacedImage
from tests.rank_shards import pack_rows
from tests.train_batches import batch_of_rows
from tests.tree_batches import TreeShape, make_tree_batch
from tests.vision_batches import make_vision_batch
from tests.vision_models import make_vision_model

CPU = torch.device("cpu")
PAD = 56
# Four features, 2 x 2, and two features, 1 x 2.
SQUARE, STRIPE = (
    ImageInput(image_id=name, width=1, height=1, grid_thw=(1, *grid), merge_size=2)
    for name, grid in (("square", (4, 4)), ("stripe", (2, 4)))
)


def placed(*images):
    return tuple(PlacedImage(start=start, image=image) for image, start in images)


@pytest.fixture(scope="module")
def vision_batch(tmp_path_factory):
    return make_vision_batch(make_vision_model("qwen3_vl", tmp_path_factory.mktemp("model")))


def by_hand():
    """Two flat rows: 1 P P P P 2 P P 3 | 4 and 1 P P 5 6 | 7, prompts of three tokens."""
    first, second = [1, PAD, PAD, PAD, PAD, 2, PAD, PAD, 3, 4], [1, PAD, PAD, 5, 6, 7, 0, 0, 0, 0]
    batch = batch_of_rows(torch.tensor([first, second]), 3, lengths=[7, 3])
    return batch.with_fields(images_B=(placed((SQUARE, 1), (STRIPE, 6)), placed((STRIPE, 1))))


def test_rows_with_images_have_positions_along_three_axes():
    batch = by_hand()
    micro = pack_rows(batch, [0, 1], batch.mask_BT, CPU, has_images=True)
    assert micro.token_S.tolist() == [1, PAD, PAD, PAD, PAD, 2, PAD, PAD, 3, 1, PAD, PAD, 5, 6]
    # The square takes two positions on each axis, the stripe one along time and height.
    assert micro.rotary_position_3S.tolist() == [
        [0, 1, 1, 1, 1, 3, 4, 4, 6, 0, 1, 1, 3, 4],
        [0, 1, 1, 2, 2, 3, 4, 4, 6, 0, 1, 1, 3, 4],
        [0, 1, 2, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
    ]
    assert micro.images.images == (SQUARE, STRIPE)
    assert micro.images.place_P.tolist() == [1, 2, 3, 4, 6, 7, 10, 11]
    assert micro.images.feature_P.tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert micro.position_S.tolist() == [*range(9), *range(5)]


def test_a_part_of_the_tokens_has_the_images_that_it_shows():
    batch = by_hand()
    images = pack_rows(batch, [0, 1], batch.mask_BT, CPU, has_images=True).images
    part = images.within(3, 7)
    assert part.images == (SQUARE, STRIPE)
    assert part.place_P.tolist() == [0, 1, 3]
    assert part.feature_P.tolist() == [2, 3, 4]
    last = images.within(7, 14)
    assert last.images == (STRIPE,)
    assert last.place_P.tolist() == [0, 3, 4]
    assert last.feature_P.tolist() == [1, 0, 1]
    assert images.within(12, 14) is None


def test_rows_of_a_text_model_have_one_position_and_no_images(batch):
    micro = pack_rows(batch, [0, 1], batch.mask_BT, CPU)
    assert micro.rotary_position_3S is None
    assert micro.images is None


def test_text_alone_has_the_same_position_on_all_axes():
    batch = make_tree_batch((TreeShape(prompt_length=4, rows=((None, 0, 3), (0, 1, 4))),))
    micro = pack_rows(batch, [0, 1], batch.mask_BT, CPU, multiple=8, has_images=True)
    assert micro.images is None
    assert torch.equal(micro.rotary_position_3S, micro.position_S.expand(3, -1))
    empty = pack_rows(batch, [], batch.mask_BT, CPU, multiple=4, has_images=True)
    assert empty.rotary_position_3S.shape == (3, 4)


def test_tokens_that_rows_share_are_placed_once(vision_batch):
    select_BT = vision_batch.mask_BT
    tree = pack_rows(vision_batch, [0, 1, 2], select_BT, CPU, has_images=True)
    # A has 2 features, B 9 and C 2.
    assert len(tree.images.place_P) == 2 + 9 + 2
    flat = vision_batch.with_fields(tree_order_B=None, shared_length_B=None)
    micro = pack_rows(flat, [0, 1, 2], select_BT, CPU, has_images=True)
    assert len(micro.images.place_P) == 3 * 2 + 2 * 9 + 2
    assert len(micro.images.images) == 3
    # Every token of a tree has the positions that it has in each of its rows.
    positions_of = {}
    for one in (tree, micro):
        rows = zip(one.position_S.tolist(), one.rotary_position_3S.t().tolist(), strict=True)
        positions_of[id(one)] = {
            (token, plain, *rotary)
            for token, (plain, rotary) in zip(one.token_S.tolist(), rows, strict=True)
        }
    assert len(set(map(frozenset, positions_of.values()))) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_share_the_placeholders(vision_batch, size):
    select_BT, rows = vision_batch.mask_BT, range(vision_batch.num_rows)
    whole = pack_rows(vision_batch, rows, select_BT, CPU, has_images=True)

    def features(micro):
        """Return (image, feature in the image, position on three axes) of each placeholder."""
        if micro.images is None:
            return []
        names = [
            (image.image_id, number)
            for image in micro.images.images
            for number in range(image.num_tokens)
        ]
        return [
            (*names[feature], *micro.rotary_position_3S[:, place].tolist())
            for place, feature in zip(
                micro.images.place_P.tolist(), micro.images.feature_P.tolist(), strict=True
            )
        ]

    parts = [
        pack_rows(
            vision_batch, rows, select_BT, CPU, context_rank=rank, context_size=size,
            has_images=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    assert sorted(chain.from_iterable(map(features, parts))) == sorted(features(whole))


def test_images_at_other_tokens_than_placeholders_are_refused():
    batch = by_hand()
    for start in (0, 7):
        images = (placed((SQUARE, 1), (STRIPE, start)), ())
        with pytest.raises(InputError) as caught:
            pack_rows(
                batch.with_fields(images_B=images), [0, 1], batch.mask_BT, CPU, has_images=True
            )
        assert f"tokens {start}.." in caught.value.name and "image stripe" in caught.value.name


def test_images_for_a_text_model_are_refused():
    batch = by_hand()
    with pytest.raises(InputError) as caught:
        pack_rows(batch, [0, 1], batch.mask_BT, CPU)
    assert (caught.value.name, caught.value.got) == ("image of row 0", "square")


def test_the_pixels_are_those_of_the_batch(vision_batch):
    micro = pack_rows(vision_batch, [0], vision_batch.mask_BT, CPU, has_images=True)
    for image, part in zip(micro.images.images, vision_batch.images_B[0], strict=True):
        assert image.pixels_HWC is part.image.pixels_HWC
        assert image.pixels_HWC.dtype == np.uint8
    again = replace(micro.images)
    assert again.within(0, len(micro.token_S)).images == micro.images.images
