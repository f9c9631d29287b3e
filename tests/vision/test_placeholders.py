"""Runs of placeholders are exactly those of the images, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.types.images import ImageInput
from mega_agentrl.vision.placeholders import (
    content_text,
    expand_placeholders,
    locate_images,
    split_at_labels,
)

PAD = 9


def make_image(rows=1, columns=1, name="a"):
    """An image of rows x columns features."""
    return ImageInput(
        image_id=name,
        width=28 * columns,
        height=28 * rows,
        grid_thw=(1, 2 * rows, 2 * columns),
        merge_size=2,
    )


def test_each_image_gets_as_many_placeholders_as_features():
    images = [make_image(1, 2), make_image(2, 2)]
    ids = expand_placeholders([1, PAD, 2, PAD], images, PAD)
    assert ids == [1, PAD, PAD, 2, PAD, PAD, PAD, PAD]
    assert [(item.start, item.stop) for item in locate_images(ids, images, PAD)] == [(1, 3), (4, 8)]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 8), max_size=4), st.integers(1, 4), st.integers(1, 4)),
        max_size=5,
    ),
    st.lists(st.integers(0, 8), max_size=4),
)
def test_located_images_cover_the_placeholders_and_nothing_else(pieces, tail):
    """Also where two images touch each other."""
    images = [make_image(rows, columns) for _, rows, columns in pieces]
    ids = [token for text, _, _ in pieces for token in (*text, PAD)] + tail
    expanded = expand_placeholders(ids, images, PAD)
    placed = locate_images(expanded, images, PAD)
    assert [item.image for item in placed] == images
    covered = [index for item in placed for index in range(item.start, item.stop)]
    assert covered == [index for index, token in enumerate(expanded) if token == PAD]
    assert [token for token in expanded if token != PAD] == [token for token in ids if token != PAD]


@pytest.mark.parametrize(
    "ids",
    [[PAD], [PAD, PAD, PAD], [PAD, 1, PAD], [], [PAD, PAD, 1, PAD]],
    ids=["cut", "too_long", "split", "missing", "stray"],
)
def test_placeholders_that_do_not_fit_the_images_are_refused(ids):
    with pytest.raises(InputError) as caught:
        locate_images(ids, [make_image(1, 2)], PAD)
    assert caught.value.got == ids.count(PAD)


def test_a_template_that_ignores_images_is_refused():
    with pytest.raises(InputError) as caught:
        expand_placeholders([1, 2], [make_image()], PAD)
    assert caught.value.got == 0


def test_labels_stand_for_images_in_texts():
    images = [make_image(1, 2), make_image(1, 1), make_image(2, 1)]
    parts = [
        {"type": "text", "text": " <result>\n"},
        {"type": "image", "image": images[0]},
        {"type": "image", "image": images[1]},
        {"type": "text", "text": "two"},
        {"type": "image", "image": images[2]},
    ]
    text = content_text(parts)
    assert text == " <result>\n[image 56 x 28][image 28 x 28]two[image 28 x 56]"
    assert split_at_labels(text, images) == parts
    assert split_at_labels("cut", images[:1]) == [
        {"type": "image", "image": images[0]},
        {"type": "text", "text": "cut"},
    ]
