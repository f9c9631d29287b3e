"""Images in questions and in tools' answers, in the form of each API."""

from __future__ import annotations

import base64

import pytest

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.rollout.gateway.chat import ChatRequest, ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.limits import ByteBudget, SharedResources
from mega_agentrl.rollout.gateway.session import AgentSession
from mega_agentrl.rollout.images import RolloutImages
from mega_agentrl.vision.processor import ImageProcessor
from tests.chat_models import Script, save_vision_folder
from tests.rollout.chat_run import call
from tests.rollout.gateway.gateway_run import (
    check_one_context,
    make_session_scope,
    open_scripted_session,
)
from tests.rollout.gateway.sdk_clients import CLIENTS
from tests.vision_models import make_picture

TURNS = [f"Let me see. {call(a=1, b=2)}", "A circle."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a vision-language model without weights."""
    return save_vision_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def codec(folder):
    """Its template."""
    return HFCodec(folder)


@pytest.fixture
def images(codec, folder):
    """Its loader."""
    return RolloutImages(ImageProcessor(folder), codec.image_tokens, max_per_answer=2)


def image_part(name, data):
    """An image as the API has it."""
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    return {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url, "detail": "auto"},
        "anthropic": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": text},
        },
    }[name]


@pytest.mark.parametrize("name", CLIENTS)
async def test_images_of_questions_and_tools_are_shown_in_one_context(codec, images, name):
    first, second = make_picture(0), make_picture(1)
    async with open_scripted_session(codec, TURNS, images=images) as (url, key, session, script):
        client = CLIENTS[name](url, key)
        history = [{"role": "user", "content": [image_part(name, first)]}]
        reply = await client.ask(history)
        results = client.tool_results(reply, [[image_part(name, second)]])
        await client.ask([*history, *reply.items, *results])
        check_one_context(codec, session, TURNS)
    request = script.requests[1]
    shown = [placed.image for placed in request.images]
    assert [image.image_id for image in shown] == [
        (await images.check(data, "here")).image_id for data in (first, second)
    ]
    num_features = request.token_ids.count(codec.image_tokens.image_id)
    assert num_features == sum(image.num_tokens for image in shown)


@pytest.mark.parametrize("name", CLIENTS)
async def test_data_that_is_no_image_is_refused(codec, images, name):
    async with open_scripted_session(codec, TURNS, images=images) as (url, key, _, script):
        client = CLIENTS[name](url, key)
        with pytest.raises(client.errors.BadRequestError):
            await client.ask([{"role": "user", "content": [image_part(name, b"no image")]}])
    assert not script.requests


def shown(*pictures, text="What is it?"):
    """A request that shows pictures."""
    parts = [{"type": "image", "data": picture} for picture in pictures]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return ChatRequest(messages=(message,), options={})


async def test_an_image_is_held_once_however_often_it_is_sent(codec, images):
    picture = make_picture(0) + bytes(100_000)  # behind the end of the image
    held = ByteBudget(1 << 20, 1 << 20)
    scope = make_session_scope(codec, Script(codec, ["So."] * 3), images=images)
    session = AgentSession(scope, SharedResources(held=held))
    for number in range(3):  # each is a conversation of its own
        request = shown(bytes(bytearray(picture)), text=f"{number}?")
        await (await session.admit(lambda request=request: request, 0))[1]
    assert 100_000 < held.total < 200_000
    blocks = session.tree.roots
    assert len(blocks) == 3
    assert len({id(block.images[0].image) for block in blocks}) == 1


async def test_images_of_refused_and_counted_requests_are_not_held(codec, images):
    held = ByteBudget(50_000, 1 << 20)
    scope = make_session_scope(codec, Script(codec, []), images=images)
    session = AgentSession(scope, SharedResources(held=held))
    request = shown(make_picture(0) + bytes(100_000))
    _, num_tokens = await session.count_tokens(lambda: request, 0)
    assert num_tokens > 1
    with pytest.raises(GatewayError) as caught, session.entering():
        await session.admit(lambda: request, 0)
    assert caught.value.kind is ErrorKind.too_large
    assert (held.total, session.tree.roots) == (0, [])
