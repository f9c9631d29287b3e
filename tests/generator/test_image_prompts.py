"""Images of requests, before vLLM sees them; `test_live_vision_engine` has the engine."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from mega_agentrl.generator.image_prompts import (
    ImagePrompts,
    ImageRequestError,
    check_images,
)
from mega_agentrl.types.images import PlacedImage
from mega_agentrl.types.records import GenerateRequest
from mega_agentrl.vision.processor import ImageProcessor, find_image_tokens
from tests.generator.vision_model import image_request, load_image
from tests.vision_models import IMAGE_ID, VIDEO_ID, make_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def request_(folder):
    """w w <start> 2 placeholders <end> w"""
    return image_request(folder, [[3, 4], load_image(folder, 0, 56, 28), [5]])


def start_at(request, start):
    (placed,) = request.images
    return replace(request, images=(replace(placed, start=start),))


def with_ids(request, *changes):
    ids = list(request.token_ids)
    for index, token in changes:
        ids[index] = token
    return replace(request, token_ids=tuple(ids))


def with_pixels(request, pixels):
    (placed,) = request.images
    image = replace(placed.image, pixels_HWC=pixels)
    return replace(request, images=(replace(placed, image=image),))


FAULTS = {
    "no-image": (lambda r: replace(r, images=()), "token_ids[3]", str(IMAGE_ID)),
    "stray": (lambda r: with_ids(r, (6, IMAGE_ID)), "token_ids[6]", str(IMAGE_ID)),
    "video": (lambda r: with_ids(r, (1, VIDEO_ID)), "token_ids[1]", str(VIDEO_ID)),
    "shifted": (lambda r: start_at(r, 2), "token_ids[2]", "58"),
    "beyond": (lambda r: start_at(r, 6), "images[0]", "tokens 6..7"),
    "twice": (lambda r: replace(r, images=r.images * 2), "images[1]", "tokens 3..4"),
    "unloaded": (lambda r: with_pixels(r, None), "images[0].image.pixels_HWC", "None"),
    "other-size": (
        lambda r: with_pixels(r, np.zeros((28, 28, 3), np.uint8)),
        "images[0].image.pixels_HWC",
        "uint8 [28, 28, 3]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault, folder, request_):
    tokens = find_image_tokens(folder)
    check_images(request_, tokens)
    spoil, field, got = FAULTS[fault]
    with pytest.raises(ImageRequestError) as caught:
        check_images(spoil(request_), tokens)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.request_id, error.field, error.got) == (request_.request_id, field, got)
    assert error.cause


def test_a_text_model_takes_no_images(request_, model_folder):
    assert find_image_tokens(model_folder) is None
    with pytest.raises(ImageRequestError) as caught:
        check_images(request_, None)
    assert (caught.value.field, caught.value.got) == ("images", "1 images")
    check_images(replace(request_, images=()), None)


async def test_a_prompt_has_the_ids_hashes_and_places_of_the_request(folder, request_):
    (placed,) = request_.images
    prompt = await ImagePrompts(folder).render(request_)
    assert prompt["type"] == "multimodal"
    assert prompt["prompt_token_ids"] == list(request_.token_ids)
    assert prompt["mm_hashes"] == {"image": [placed.image.image_id]}
    (place,) = prompt["mm_placeholders"]["image"]
    assert (place.offset, place.length) == (3, 2)
    (item,) = prompt["mm_kwargs"]["image"]
    data = item.get_data()
    np.testing.assert_array_equal(
        data["pixel_values"].numpy(), ImageProcessor(folder).patches(placed.image)
    )
    assert data["image_grid_thw"].tolist() == [1, 2, 4]
    assert item["image_grid_thw"].field.keep_on_cpu
    assert item["pixel_values"].field.keep_on_cpu is not torch.cuda.is_available()
    text = GenerateRequest(request_id="t", token_ids=(1, 2), max_tokens=1)
    assert await ImagePrompts(folder).render(text) == {"type": "token", "prompt_token_ids": [1, 2]}


async def test_an_image_is_cut_once_until_there_is_no_room_for_it(folder, monkeypatch):
    cut_ids = []
    patches_of = ImageProcessor.patches

    def counting(self, image):
        cut_ids.append(image.image_id)
        return patches_of(self, image)

    monkeypatch.setattr(ImageProcessor, "patches", counting)
    images = [load_image(folder, seed, 56, 56) for seed in range(3)]
    one, two, three = (image_request(folder, [image]) for image in images)
    size = patches_of(ImageProcessor(folder), images[0]).nbytes
    prompts = ImagePrompts(folder, max_bytes=2 * size)
    await asyncio.gather(*(prompts.render(one) for _ in range(5)))
    await prompts.render(two)
    await prompts.render(one)
    await prompts.render(three)  # in the place of `two`
    await prompts.render(one)
    assert cut_ids == [image.image_id for image in images]
    await prompts.render(two)
    assert cut_ids[3:] == [images[1].image_id]


def test_the_tokens_of_images_are_banned(folder, model_folder):
    assert set(ImagePrompts(folder).banned_ids) == {56, 57, 58, 59}
    assert ImagePrompts(model_folder).banned_ids == ()


def test_an_image_may_stand_at_either_end(folder):
    image = load_image(folder, 1)
    request = image_request(folder, [image, image])
    check_images(request, find_image_tokens(folder))
    assert [placed.start for placed in request.images] == [1, image.num_tokens + 3]
    assert isinstance(request.images[0], PlacedImage)
