"""A live engine with a vision-language model, compared with transformers.

One file, so that one process starts one engine per family for all of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")

from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator.engine_args import CPU_BLOCK_TOKENS
from mega_agentrl.generator.image_prompts import ImageRequestError
from mega_agentrl.generator.weights.loader_trace import trace_engine_layouts
from mega_agentrl.types.images import PlacedImage
from mega_agentrl.types.records import GenerateRequest
from tests.generator.engine_host import DEADLINE_S, EngineHost
from tests.generator.live_transfer import LiveTransfer
from tests.generator.vision_model import (
    TOLERANCE,
    check_image_generation,
    image_logits_of,
    image_request,
    load_image,
    write_vision_model,
    write_with_another_tower,
)
from tests.reshard.fake_trainer import FakeTrainer
from tests.vision_models import END_ID, IMAGE_ID, START_ID, VIDEO_ID

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("inspect_models_in_process")]

VISION_IDS = {IMAGE_ID, VIDEO_ID, START_ID, END_ID}
TEXT = range(5, 25)


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow(6))]
)
def folder(request, tmp_path_factory):
    return write_vision_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def vision_engine(folder, tmp_path_factory):
    config = EngineConfig(max_model_len=512, cpu_kv_cache_gib=1)
    host = EngineHost(config, folder, tmp_path_factory.mktemp("vision_engine") / "vllm.log")
    yield host
    host.close()


def check(vision_engine, folder, request):
    """Generate and compare; returns the generation."""
    got = vision_engine.call("generate", request)
    check_image_generation(folder, request, got)
    return got


def test_log_probs_are_those_of_transformers_with_and_without_images(vision_engine, folder):
    one, two = load_image(folder, 1), load_image(folder, 2, 84, 84)
    requests = [
        image_request(folder, [TEXT]),
        image_request(folder, [one, TEXT]),
        image_request(folder, [[3, 4], one, [5], two, TEXT], temperature=0.7),
        image_request(folder, [two, one], temperature=0.0),
        image_request(folder, [TEXT, one, TEXT, one, [9]], top_p=0.9, top_k=20),
    ]
    for request, got in zip(requests, vision_engine.call("generate_many", requests), strict=True):
        check_image_generation(folder, request, got)


def test_an_image_may_follow_sampled_tokens(vision_engine, folder):
    first = image_request(folder, [load_image(folder, 3), TEXT])
    grown = [*first.token_ids, *check(vision_engine, folder, first).token_ids]
    second = image_request(folder, [grown, load_image(folder, 4, 56, 84), [7, 8]])
    check(vision_engine, folder, replace(second, images=first.images + second.images))


def test_images_are_told_apart_under_the_same_ids_and_found_again_in_the_cache(
    vision_engine, folder
):
    block = CPU_BLOCK_TOKENS
    one, two = load_image(folder, 5), load_image(folder, 6)
    parts = [range(5, 15), one, range(15, 45), range(5, 45)]
    request = image_request(folder, parts, temperature=0.0)
    num_whole = (len(request.token_ids) - 1) // block * block
    assert num_whole >= 2 * block
    first, again = (
        check(vision_engine, folder, replace(request, request_id=name))
        for name in ("first", "again")
    )
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, num_whole)
    assert again.token_ids == first.token_ids
    other = replace(image_request(folder, [parts[0], two, *parts[2:]]), temperature=0.0)
    assert other.token_ids == request.token_ids
    got = check(vision_engine, folder, other)
    assert got.num_cached_tokens == 0
    assert got.logps != first.logps


def test_a_held_request_computes_an_image_again_that_it_found_in_the_cache(vision_engine, folder):
    request = image_request(
        folder, [load_image(folder, 11), TEXT, TEXT], max_tokens=400, temperature=0.0
    )
    check(vision_engine, folder, replace(request, request_id="first", max_tokens=1))
    cached = check(vision_engine, folder, replace(request, request_id="cached", max_tokens=1))
    assert cached.num_cached_tokens == CPU_BLOCK_TOKENS
    assert request.images[0].stop <= CPU_BLOCK_TOKENS
    running = vision_engine.begin("generate", request)
    while vision_engine.call("num_sampled") < 20:
        assert not running.done(), "it was over before it could be held"
    vision_engine.call("pause", True)
    vision_engine.call("resume")
    check_image_generation(folder, request, running.result(DEADLINE_S))


def test_tokens_of_images_are_preferred_but_never_sampled(vision_engine, folder):
    requests = [
        image_request(
            folder,
            [load_image(folder, number), TEXT],
            temperature=temperature,
            seed=number,
            max_tokens=40,
        )
        for number, temperature in enumerate((0.0, 0.5, 1.0, 2.0))
    ]
    for request, got in zip(requests, vision_engine.call("generate_many", requests), strict=True):
        check_image_generation(folder, request, got)
        assert VISION_IDS & set(got.argmax_ids)
        assert not VISION_IDS & set(got.token_ids)
        if not request.temperature:
            pairs = zip(got.argmax_ids, got.token_ids, strict=True)
            assert all(best in VISION_IDS or best == token for best, token in pairs)


def test_a_refused_request_does_not_hinder_the_next(vision_engine, folder):
    image = load_image(folder, 7)
    stray = image_request(folder, [image, TEXT, [IMAGE_ID]])
    unloaded = image_request(folder, [replace(image, pixels_HWC=None), TEXT])
    shifted = image_request(folder, [image, TEXT])
    shifted = replace(shifted, images=(PlacedImage(start=2, image=image),))
    for bad, field in ((stray, "token_ids["), (unloaded, "pixels_HWC"), (shifted, "token_ids[")):
        with pytest.raises(ImageRequestError) as caught:
            vision_engine.call("generate", bad)
        assert field in caught.value.field
    check(vision_engine, folder, image_request(folder, [image, TEXT]))


# --- Weight updates ---


@pytest.fixture(scope="module")
def new_folder(folder, tmp_path_factory):
    """The same decoder with another tower."""
    return write_with_another_tower(tmp_path_factory.mktemp("new") / "model", folder)


@pytest.fixture(scope="module")
def trainer(folder):
    trainer = FakeTrainer(folder)
    yield trainer
    trainer.close()


@pytest.fixture
def update(vision_engine, trainer, folder):
    with LiveTransfer.connected(trainer, vision_engine, folder) as update:
        yield update


def test_features_of_an_older_tower_are_not_used_after_an_update(
    vision_engine, update, folder, new_folder
):
    assert update.layouts == [trace_engine_layouts(folder, 1, "float32")]
    request = image_request(folder, [load_image(folder, 8), TEXT, TEXT])
    old = check(vision_engine, folder, request)
    cached = check(vision_engine, folder, replace(request, request_id="cached"))
    assert cached.num_cached_tokens == CPU_BLOCK_TOKENS
    probe = [*range(20), IMAGE_ID, VIDEO_ID, *range(20, 30)]
    for version, each in enumerate((new_folder, folder), 1):
        update(each, version)
        probe_logp_T = prompt_logps(each, probe)
        found_T = torch.tensor(vision_engine.call("compute_prompt_log_probs", probe))
        torch.testing.assert_close(found_T, probe_logp_T, rtol=TOLERANCE, atol=TOLERANCE)
        got = check(vision_engine, each, replace(request, request_id=each.name))
        assert (got.version, got.num_cached_tokens) == (version, 0)
        if each is new_folder:
            assert max(abs(a - b) for a, b in zip(got.logps, old.logps, strict=False)) > 1e-2


@pytest.mark.slow(20)
def test_a_held_request_goes_on_with_the_features_of_the_new_tower(
    vision_engine, update, folder, new_folder
):
    update(folder, 1)
    image = load_image(folder, 9)
    request = image_request(folder, [image, TEXT], max_tokens=400, temperature=0.0)
    running = vision_engine.begin("generate", request)
    while vision_engine.call("num_sampled") < 20:
        assert not running.done(), "it was over before it could be held"
    update(new_folder, 2, hold=True)
    got = running.result(DEADLINE_S)
    assert set(got.versions) == {1, 2}
    tokens = torch.tensor(got.token_ids)
    for version, each in ((1, folder), (2, new_folder)):
        is_own_T = torch.tensor(got.versions) == version
        logp_TV = image_logits_of(each, request, got.token_ids).log_softmax(-1)
        expected_T = logp_TV.gather(1, tokens[:, None])[:, 0]
        found_T = torch.tensor(got.logps)
        close = {"rtol": TOLERANCE, "atol": TOLERANCE}
        torch.testing.assert_close(found_T[is_own_T], expected_T[is_own_T], **close)


@pytest.mark.slow(60)
@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True, scope="module")
def test_two_tensor_ranks_share_a_tower(folder, new_folder, trainer, tmp_path):
    config = EngineConfig(tensor_parallel_size=2, max_model_len=512, cpu_kv_cache_gib=1)
    split = EngineHost(config, folder, tmp_path / "vllm.log", load_weights=False)
    try:
        update = LiveTransfer(trainer, [split])
        update.connect()
        request = image_request(folder, [load_image(folder, 10), TEXT])
        for version, each in enumerate((folder, new_folder), 1):
            update(each, version)
            check(split, each, replace(request, request_id=each.name))
    finally:
        split.close()


def prompt_logps(folder, ids):
    """Log-probs of the ids after the first, all of them text, by transformers."""
    request = GenerateRequest(request_id="probe", token_ids=tuple(ids[:1]), max_tokens=1)
    logp_TV = image_logits_of(folder, request, ids[1:]).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
