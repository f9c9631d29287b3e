"""Images of a tree on the page: each once, decoded anew, bounded in number and bytes."""

from __future__ import annotations

import base64
import io
from functools import partial

import numpy as np
import pytest
from PIL import Image

from mega_agentrl.report.tree_viewer import thumbnails
from mega_agentrl.report.tree_viewer.thumbnails import (
    MAX_THUMBNAIL_BYTES,
    MAX_THUMBNAILS_PER_TREE,
    TreeThumbnails,
    thumbnail_uri,
)
from mega_agentrl.report.tree_viewer.tree_json import tree_to_json
from mega_agentrl.rollout.io.image_files import find_image
from mega_agentrl.rollout.io.nodes import to_rollout_tree
from mega_agentrl.rollout.io.tree_file import read_trees, write_trees
from mega_agentrl.types.images import ImageInput
from mega_agentrl.vision.loader import ImageLimits
from tests.report.pages import characters, tree_with_images
from tests.vision_models import make_picture


def image_of(data, name="a", width=56, height=28, path=""):
    return ImageInput(
        image_id=name,
        data=data,
        path=path,
        width=width,
        height=height,
        grid_thw=(1, 2, 4),
        merge_size=2,
    )


@pytest.fixture(autouse=True)
def _empty_cache():
    thumbnail_uri.cache_clear()


def pixels(uri):
    head, _, text = uri.partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)


def test_a_small_image_is_shown_exactly():
    data = make_picture(3)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(pixels(thumbnail_uri(image_of(data))), np.asarray(image))


def test_a_large_image_is_reduced_and_stays_within_the_bytes():
    uri = thumbnail_uri(image_of(make_picture(0, 2000, 1000), width=2000, height=1000))
    assert pixels(uri).shape == (64, 128, 3)
    assert len(base64.b64decode(uri.partition(",")[2])) <= MAX_THUMBNAIL_BYTES


def test_bytes_that_follow_the_pixels_do_not_reach_the_page():
    secret = b"</script><script>owned"
    text = base64.b64decode(thumbnail_uri(image_of(make_picture(0) + secret)).partition(",")[2])
    assert secret not in text


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(image_of(b"<svg onload='x'/>"), id="another_format"),
        pytest.param(image_of(make_picture(0)[:60]), id="cut"),
        pytest.param(image_of(b"", path="/nowhere/a.png"), id="gone"),
    ],
)
def test_an_image_that_cannot_be_shown_has_a_label_only(image):
    shown = TreeThumbnails()
    assert shown.add([image]) == [0]
    (entry,) = shown.to_json()
    assert entry.keys() == {"label"}


def test_a_header_that_promises_too_many_pixels_is_not_decoded(monkeypatch):
    monkeypatch.setattr(thumbnails, "_LIMITS", ImageLimits(max_file_pixels=56 * 28 - 1))
    assert thumbnail_uri(image_of(make_picture(0))) == ""


def test_each_image_is_stored_once_and_only_the_first_have_thumbnails():
    data = make_picture(0)
    images = [image_of(data, str(index)) for index in range(MAX_THUMBNAILS_PER_TREE + 3)]
    shown = TreeThumbnails()
    assert shown.add(images[:2]) == [0, 1]
    assert shown.add(reversed(images)) == [*range(2, len(images)), 1, 0]
    entries = shown.to_json()
    assert len(entries) == len(images)
    assert sum("src" in entry for entry in entries) == MAX_THUMBNAILS_PER_TREE


def test_the_question_and_the_answer_name_their_images():
    picture, answer = image_of(make_picture(0), "a"), image_of(make_picture(1), "b")
    view = tree_to_json(tree_with_images(picture, answer), characters)
    assert view["question"] == [
        {"role": "user", "text": "[image 56 x 28]What is this?", "images": [0]}
    ]
    turns = [turn for path in view["paths"] for turn in path["turns"]]
    # The forks share the turn with the answer, which is written with the path that sampled it.
    assert [turn["images"] for turn in turns if "images" in turn] == [[1]]
    assert [len(pixels(entry["src"])) for entry in view["images"]] == [28, 28]


def test_images_of_a_tree_file_are_found_beside_it(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    write_trees(
        path,
        [tree_with_images(image_of(make_picture(0), "a"), image_of(b"", "b"))],
        stage="rl",
        step=1,
    )
    (stored,) = read_trees(path)
    tree = to_rollout_tree(stored.tree)
    view = tree_to_json(tree, characters, find_image=partial(find_image, tmp_path))
    with_thumbnail, without = view["images"]
    assert len(pixels(with_thumbnail["src"])) == 28
    assert without.keys() == {"label"}


@pytest.mark.parametrize("image_id", ["../a", "../images/a", "", "."])
def test_no_id_of_an_image_is_a_path(tmp_path, image_id):
    (tmp_path / "images").mkdir()
    for file in (tmp_path / "a.png", tmp_path / "images" / "a.png", tmp_path / "images" / ".png"):
        file.write_bytes(make_picture(0))
    assert find_image(tmp_path, "a") == tmp_path / "images" / "a.png"
    assert find_image(tmp_path, image_id) is None


def test_an_image_in_two_places_has_one_thumbnail():
    picture = image_of(make_picture(0))
    view = tree_to_json(tree_with_images(picture, picture))
    assert len(view["images"]) == 1
