"""Rollouts with images: in the prompt, in tools' answers, across forks, within budgets."""

from __future__ import annotations

import asyncio
import io
import pickle
import threading
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from mega_agentrl.config.enums import Branching, CallProtocol, TemplateCheck
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.config.sections.tools import ZoomToolConfig
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.report.tree_viewer.tree_json import tree_to_json
from mega_agentrl.rollout import images as images_module
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.conversation.messages import template_drift
from mega_agentrl.rollout.images import RolloutImages, check_answers
from mega_agentrl.rollout.io.image_files import MAX_FILE_BYTES, find_image, write_images
from mega_agentrl.rollout.io.nodes import to_rollout_tree
from mega_agentrl.rollout.io.render import render_trajectory, render_tree
from mega_agentrl.rollout.io.tree_file import read_trees, write_trees
from mega_agentrl.rollout.metrics.failures import count_failures
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.zoom import ZoomTool
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.images import PlacedImage
from mega_agentrl.types.records import StopReason, ToolOutcome, ToolStatus
from mega_agentrl.vision import loader
from mega_agentrl.vision.container import read_container
from mega_agentrl.vision.placeholders import locate_images
from mega_agentrl.vision.processor import ImageProcessor
from tests.chat_models import TEMPLATES, Script, save_vision_folder
from tests.fakes import FakeRubric, make_context, make_prompt
from tests.rollout.chat_run import call
from tests.vision_models import make_picture

ZOOM = call("zoom", image=1, box=[0, 0, 28, 14])
NO_FORKS = {"group_size": 1, "branching": Branching.none}
HERMES, TAGS = CallProtocol.hermes, CallProtocol.tags


class Camera(Tool):
    """Answers with the images given at construction."""

    name = "camera"
    text_argument = "text"

    def __init__(self, *files, text="click"):
        self._response = ToolResponse(text=text, images=files)

    async def execute(self, state, arguments, kwargs):
        return self._response


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def codec(folder):
    return HFCodec(folder)


@pytest.fixture(scope="module")
def processor(folder):
    return ImageProcessor(folder)


@pytest.fixture
def images(codec, processor):
    return RolloutImages(processor, codec.image_tokens, max_per_answer=2)


def make_kit(codec, *tools, protocol=HERMES):
    zoom = ZoomTool(ZoomToolConfig(enabled=True, min_side=56))
    return ToolKit([zoom, *tools], control_tokens=codec.control_tokens, protocol=protocol)


def prompt_with(codec, processor, kit, *pictures, text="Where is it?"):
    """A prompt whose message has the pictures before the text."""
    parts = [{"type": "image", "image": processor.measure(data)} for data in pictures]
    messages = ({"role": "user", "content": [*parts, {"type": "text", "text": text}]},)
    schemas = tuple(kit.schemas().values()) if kit.uses_tool_messages else ()
    ids = codec.apply_chat_template(messages, schemas)
    placed = locate_images(ids, [part["image"] for part in parts], codec.image_tokens.image_id)
    return make_prompt(messages=messages, token_ids=tuple(ids), images=placed, tool_schemas=schemas)


async def sample(codec, images, prompt, kit, turns, *, protocol=HERMES, script=None, **options):
    """The tree and the engine that was asked."""
    script = script or Script(codec, turns)
    defaults = NO_FORKS | {"call_protocol": protocol, "max_response_tokens": 4000}
    context = make_context(
        RolloutConfig(**(defaults | options)),
        generator=script,
        tools=kit,
        codec=codec,
        max_model_len=10_000,
        images=images,
    )
    (tree,) = await collect_rollouts([prompt], FakeRubric(), context)
    return tree, script


def check_placeholders(codec, token_ids, images):
    """The images stand exactly where the placeholders are."""
    found = locate_images(
        token_ids, [placed.image for placed in images], codec.image_tokens.image_id
    )
    assert found == tuple(images)


async def test_the_policy_sees_prompt_and_zoomed_region(codec, processor, images):
    """By hand: 56 x 28 pixels are 2 features; a region of 28 x 14 is enlarged to 112 x 56."""
    kit = make_kit(codec)
    picture = make_picture(0)
    prompt = prompt_with(codec, processor, kit, picture)
    tree, script = await sample(codec, images, prompt, kit, [ZOOM, "there"])
    (trajectory,) = tree.trajectories
    assert trajectory.stop_reason is StopReason.eos and trajectory.template_drift == ""
    first, second = script.requests
    assert [placed.image.num_tokens for placed in first.images] == [2]
    assert [placed.image.num_tokens for placed in second.images] == [2, 8]
    for request in script.requests:
        check_placeholders(codec, request.token_ids, request.images)
        assert all(placed.image.pixels_HWC is not None for placed in request.images)
    (shown,) = trajectory.images
    size = len(prompt.token_ids)
    assert shown.shifted(size) == second.images[1] and shown.image.pixels_HWC is None
    ids = trajectory.token_ids
    assert {ids[index] for index in range(shown.start, shown.stop)} == {258}
    assert not any(trajectory.loss_mask[shown.start - 1 : shown.stop + 1])
    region = Image.open(io.BytesIO(shown.image.data))
    assert region.size == (112, 56)
    expected = Image.open(io.BytesIO(picture)).crop((0, 0, 28, 14)).resize((112, 56), 3)
    np.testing.assert_array_equal(np.asarray(region), np.asarray(expected))
    assert trajectory.turns[1].text.startswith("[image 112 x 56]Region [0, 0, 28, 14] of image 1")


async def test_zoom_counts_what_the_conversation_has_shown(codec, processor, images):
    kit = make_kit(codec, Camera(make_picture(1, 84, 56)))
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    turns = [
        call("zoom", image=2, box=[0, 0, 9, 9]),
        call("camera", text="x"),
        call("zoom", image=2, box=[0, 0, 84, 56]),
        call("zoom", image=3, box=[0, 0, 85, 1]),
        "done",
    ]
    tree, script = await sample(codec, images, prompt, kit, turns, max_tool_calls=9, max_turns=9)
    answers = [turn.outcome for turn in tree.trajectories[0].turns if turn.outcome]
    assert [answer.status.value for answer in answers] == ["user_error", "ok", "ok", "user_error"]
    assert "choose one from 1 to 1" in answers[0].answer
    assert "image 3, which has 84 x 56 pixels" in answers[3].answer
    assert len(script.requests[-1].images) == 3


async def test_several_calls_of_one_turn_keep_their_order(codec, processor, images):
    kit = make_kit(codec, Camera(make_picture(1, 28, 28), make_picture(2, 56, 56)))
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    both = call("camera", text="x") + "\n" + ZOOM + "\n" + call("none")
    tree, _ = await sample(codec, images, prompt, kit, [both, "done"], max_tool_calls=9)
    (trajectory,) = tree.trajectories
    assert [placed.image.num_tokens for placed in trajectory.images] == [1, 4, 8]
    assert trajectory.template_drift == ""
    check_placeholders(codec, trajectory.token_ids, trajectory.images)


async def test_tags_show_an_image_within_the_result(codec, processor, images):
    """An answer that imitates a label stays text."""
    kit = make_kit(
        codec, Camera(make_picture(1), text="[image 56 x 28]<|image_pad|>"), protocol=TAGS
    )
    prompt = prompt_with(codec, processor, kit)
    turns = ["<camera>x</camera>" + Script.CUT, "done"]
    tree, script = await sample(codec, images, prompt, kit, turns, protocol=TAGS)
    (trajectory,) = tree.trajectories
    (placed,) = trajectory.images
    text = codec.decode_with_special_tokens(trajectory.token_ids)
    vision = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    assert f"<camera>x</camera> <result>\n{vision}[image 56 x 28]&lt;|image_pad|>" in text
    assert placed.image.num_tokens == 2
    assert "| [image 56 x 28][image 56 x 28]&lt;|" in render_trajectory(trajectory)
    check_placeholders(codec, script.requests[1].token_ids, script.requests[1].images)


async def test_a_template_that_drops_images_of_the_assistant_is_drift(
    codec, processor, images, tmp_path
):
    """Within the assistant's turn, the answer has an image, which this template leaves out."""
    template = (TEMPLATES / "qwen25vl.jinja").read_text()
    texts = "message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join"
    shown = "'\\n' + render(message.content) + '<|im_end|>"
    assert shown in template
    dropping = (
        f"'\\n' + (render(message.content) if message.role == 'user' else {texts}) + '<|im_end|>"
    )
    folder = save_vision_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template.replace(shown, dropping))
    kit = make_kit(codec, Camera(make_picture(1)), protocol=TAGS)
    prompt = prompt_with(codec, processor, kit)
    turns = ["<camera>x</camera>" + Script.CUT, "done"]
    tree, _ = await sample(codec, images, prompt, kit, turns, protocol=TAGS)
    (trajectory,) = tree.trajectories
    drift = partial(
        template_drift,
        prompt,
        trajectory.token_ids,
        trajectory.turns,
        mode=TemplateCheck.strict,
        images=[placed.image for placed in trajectory.images],
        in_chat=False,
    )
    assert drift(codec=codec) == ""
    assert "image placeholders" in drift(codec=HFCodec(folder))


class ForkingScript(Script):
    """An engine whose entropies rise after a tool's answer, and which writes by context."""

    async def generate(self, request):
        self.requests.append(request)
        num_images = len(request.images)
        text = "there" if num_images > 1 else ZOOM
        ids = [*self.codec.encode(text), self.codec.eos_id]
        written = self._written(request.token_ids)
        ids = ids[written:][: request.max_tokens]
        generation = await Script(self.codec, ["x" * 200]).generate(replace(request, max_tokens=1))
        count = len(ids)
        finish = "eos" if ids[-1] == self.codec.eos_id else "length"
        return replace(
            generation,
            token_ids=tuple(ids),
            logps=(-1.0,) * count,
            entropies=(5.0 if num_images > 1 else 1.0,) * count,
            argmax_ids=tuple(ids),
            finish_reason=type(generation.finish_reason)(finish),
        )

    def _written(self, token_ids):
        """Number of tokens of the open turn, which starts after `assistant` and a line break."""
        head = tuple(self.codec.encode("assistant\n"))
        starts = [i for i in range(len(token_ids)) if token_ids[i : i + len(head)] == head]
        return len(token_ids) - starts[-1] - len(head)


async def test_forks_share_the_images_before_them(codec, processor, images, tmp_path):
    kit = make_kit(codec)
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    script = ForkingScript(codec, [])
    script.codec = codec
    tree, _ = await sample(
        codec,
        images,
        prompt,
        kit,
        [],
        script=script,
        group_size=3,
        branching=Branching.after_result,
        branch=BranchConfig(initial_rollouts=1, num_probe_tokens=2),
    )
    forks = [item for item in tree.trajectories if item.parent_id is not None]
    assert forks, render_tree(tree)
    root = tree.trajectories[0]
    for fork in forks:
        assert fork.images == root.images and fork.fork_len >= fork.images[0].stop
        check_placeholders(codec, fork.token_ids, fork.images)
    loaded = {id(placed.image) for request in script.requests for placed in request.images}
    assert len(loaded) == 2
    trees = images.load_trees([tree])
    pixels = [item.images[0].image.pixels_HWC for item in trees[0].trajectories if item.images]
    assert all(array is pixels[0] for array in pixels)
    path = tmp_path / "step.jsonl"
    write_trees(path, [tree], stage="rl", step=1)
    (stored,) = read_trees(path)
    back = to_rollout_tree(stored.tree)
    assert back.prompt == prompt
    assert [item.images for item in back.trajectories] == [
        item.images for item in tree.trajectories
    ]
    assert back.trajectories[0].images[0].image.data == b""
    file = find_image(tmp_path, root.images[0].image.image_id)
    assert file.read_bytes() == root.images[0].image.data
    assert len(pickle.dumps(tree)) < 200_000
    view = tree_to_json(back, find_image=partial(find_image, tmp_path))
    assert [entry["src"][:11] for entry in view["images"]] == ["data:image/"] * 2
    assert view["question"] == [
        {"role": "user", "text": "[image 56 x 28]Where is it?", "images": [0]}
    ]
    assert [turn.get("images") for turn in view["paths"][0]["turns"]] == [None, [1], None]


async def test_an_answer_is_cut_around_its_image(codec, processor, images):
    """The text is cut so that the whole image fits; an image that does not fit ends the path."""
    picture = make_picture(1, 112, 112)
    kit = make_kit(codec, Camera(picture, text="y" * 500))
    prompt = prompt_with(codec, processor, kit)
    turns = [call("camera", text="x"), "done"]
    num_call = len(codec.encode(turns[0])) + 1
    for room, is_shown in ((140, True), (60, False)):
        tree, _ = await sample(
            codec, images, prompt, kit, turns, max_response_tokens=num_call + room
        )
        (trajectory,) = tree.trajectories
        assert len(trajectory.images) == is_shown
        answer = trajectory.turns[1]
        assert (answer.stop > answer.start) is is_shown
        expected = StopReason.eos if is_shown else StopReason.length
        assert trajectory.stop_reason is expected
        check_placeholders(codec, trajectory.token_ids, trajectory.images)


async def test_a_context_rendered_anew_has_all_images(codec, processor, images):
    kit = make_kit(codec)
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    tree, script = await sample(
        codec,
        images,
        prompt,
        kit,
        [ZOOM, ZOOM, "there"],
        use_inference_chat_template=True,
        template_check=TemplateCheck.off,
    )
    resets = tree.trajectories[0].context_resets
    assert [len(reset.images) for reset in resets] == [2, 3]
    for reset in resets:
        check_placeholders(codec, reset.token_ids, reset.images)
    assert [len(request.images) for request in script.requests] == [1, 2, 3]
    for request in script.requests:
        check_placeholders(codec, request.token_ids, request.images)


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ((b"no image",), ToolStatus.user_error),
        ((make_picture(0)[:-400],), ToolStatus.user_error),
        ((make_picture(0),) * 3, ToolStatus.user_error),
    ],
    ids=["not_an_image", "truncated", "too_many"],
)
async def test_bad_images_of_a_tool_are_outcomes(codec, processor, images, files, status):
    kit = make_kit(codec, Camera(*files))
    prompt = prompt_with(codec, processor, kit)
    tree, _ = await sample(codec, images, prompt, kit, [call("camera", text="x"), "done"])
    (trajectory,) = tree.trajectories
    outcome = trajectory.turns[1].outcome
    assert outcome.status is status and not outcome.images and not trajectory.images
    assert trajectory.stop_reason is StopReason.eos, "the policy must not choose to be masked"


async def test_a_model_of_text_gets_no_images_and_is_not_masked_for_asking():
    outcome = ToolOutcome(
        tool="camera", status=ToolStatus.ok, answer="", latency_s=0.0, images=(b"x",)
    )
    (found,) = await check_answers(None, [outcome])
    assert found.status is ToolStatus.user_error and not found.images


async def test_the_images_of_a_trajectory_are_bounded_in_bytes(
    codec, processor, images, monkeypatch
):
    """Two of three pictures fit; of the third the policy is told."""
    pictures = [make_picture(seed) for seed in range(3)]
    monkeypatch.setattr(images_module, "MAX_TRAJECTORY_BYTES", sum(map(len, pictures)) - 1)
    cameras = [Camera(picture) for picture in pictures]
    for camera, name in zip(cameras, "abc", strict=True):
        camera.name = name
    kit = make_kit(codec, *cameras)
    both = call("a", text="x") + "\n" + call("b", text="x")
    turns = [both, call("c", text="x"), "done"]
    prompt = prompt_with(codec, processor, kit)
    tree, _ = await sample(codec, images, prompt, kit, turns, max_tool_calls=9)
    (trajectory,) = tree.trajectories
    answers = [turn.outcome.status.value for turn in trajectory.turns if turn.outcome]
    assert answers == ["ok", "ok", "user_error"] and len(trajectory.images) == 2


async def test_a_vanished_file_fails_its_trajectory(codec, processor, images, tmp_path):
    kit = make_kit(codec)
    file = tmp_path / "a.png"
    file.write_bytes(make_picture(0))
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    image = replace(prompt.images[0].image, data=b"", path=str(file))
    prompt = replace(prompt, images=(replace(prompt.images[0], image=image),))
    file.write_bytes(make_picture(5))
    tree, script = await sample(codec, images, prompt, kit, [])
    (trajectory,) = tree.trajectories
    assert trajectory.stop_reason is StopReason.tool_failure
    assert "the file was replaced" in trajectory.failure_reason and not script.requests


class LosingImages(RolloutImages):
    """Images whose files are gone after `num_loads` calls."""

    num_loads = 0

    async def load(self, images):
        self.num_loads -= 1
        if self.num_loads < 0:
            gone = replace(images[0].image, data=b"", path="nowhere.png", image_id="x")
            images = [replace(images[0], image=gone)]
        return await super().load(images)


@pytest.mark.parametrize(
    ("branching", "num_loads"),
    [(Branching.none, 1), (Branching.released, 0)],
    ids=["trajectory", "lockstep"],
)
async def test_a_file_that_vanishes_before_a_request_counts_as_a_failure(
    codec, processor, branching, num_loads
):
    """The engine has not aborted anything, so the bound of failed trajectories applies."""
    images = LosingImages(processor, codec.image_tokens)
    images.num_loads = num_loads
    kit = make_kit(codec, protocol=TAGS)
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    tree, script = await sample(codec, images, prompt, kit, [], protocol=TAGS, branching=branching)
    (trajectory,) = tree.trajectories
    assert trajectory.stop_reason is StopReason.tool_failure and not script.requests
    assert "nowhere.png" in trajectory.failure_reason
    assert count_failures([tree]).exceeds(0.5)


async def test_large_images_are_reduced_beside_the_trees(codec, processor, images, tmp_path):
    kit = make_kit(codec)
    picture = make_picture(0, 600, 300)
    assert len(picture) > MAX_FILE_BYTES
    prompt = prompt_with(codec, processor, kit, picture)
    tree, _ = await sample(codec, images, prompt, kit, ["there"])
    write_trees(tmp_path / "step.jsonl", [tree], stage="rl", step=1)
    (file,) = (tmp_path / "images").iterdir()
    assert file.suffix == ".jpeg" and Image.open(file).size == (512, 256)
    assert (tmp_path / "step.jsonl").stat().st_size < MAX_FILE_BYTES


async def test_a_damaged_image_is_left_out_beside_the_trees(codec, processor, images, tmp_path):
    """Pillow raises a `SyntaxError` at a chunk without a name."""
    kit = make_kit(codec)
    picture = make_picture(0, 600, 300)
    prompt = prompt_with(codec, processor, kit, picture)
    tree, _ = await sample(codec, images, prompt, kit, ["there"])
    last = picture.rindex(b"IDAT")
    damaged = replace(
        prompt.images[0].image, data=picture[:last] + b"\0\0\0\0" + picture[last + 4 :]
    )
    write_images(tmp_path, [_with_image(tree, damaged)])
    assert not (tmp_path / "images").exists()


async def test_an_image_beyond_the_default_bounds_is_beside_the_trees(
    codec, processor, images, tmp_path
):
    """A run may have larger bounds than the default ones."""
    kit = make_kit(codec)
    prompt = prompt_with(codec, processor, kit, make_picture(0))
    tree, _ = await sample(codec, images, prompt, kit, ["there"])
    buffer = io.BytesIO()
    Image.new("L", (10_000, 5_001)).save(buffer, format="PNG")
    large = replace(prompt.images[0].image, data=buffer.getvalue())
    write_images(tmp_path, [_with_image(tree, large)])
    assert find_image(tmp_path, large.image_id).suffix == ".png"


def _with_image(tree, image):
    """A tree whose prompt has this image."""
    placed = replace(tree.prompt.images[0], image=image)
    content = [{"type": "image", "image": image}]
    prompt = replace(
        tree.prompt, images=(placed,), messages=({"role": "user", "content": content},)
    )
    return replace(tree, prompt=prompt)


def test_an_image_id_is_not_used_as_a_pattern(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").touch()
    assert find_image(tmp_path, "a") == tmp_path / "images" / "a.png"
    assert find_image(tmp_path, "*") is None and find_image(tmp_path, "b") is None


async def test_an_image_of_somebody_else_is_parsed_once_and_never_on_the_event_loop(
    images, monkeypatch
):
    """Twice in threads, for its size and for its pixels; later its record is found by its bytes."""
    parsing: list[threading.Thread] = []

    def read(data):
        parsing.append(threading.current_thread())
        return read_container(data)

    monkeypatch.setattr(loader, "read_container", read)
    data = make_picture(7)
    record = await images.check(data, "here")
    assert len(parsing) == 2 and threading.current_thread() not in parsing
    outcome = ToolOutcome(
        tool="camera", status=ToolStatus.ok, answer="", latency_s=0.0, images=(data + b"",)
    )
    for _ in range(3):
        assert await images.check(bytes(bytearray(data)), "again") is record
        checked = await images.check_answer(outcome)
        assert checked.images == (record,) and await images.check_answer(checked) == checked
    assert len(parsing) == 2
    gone = weakref.ref(record)
    del record, checked
    images._threads.shutdown()  # a thread may not yet have let go of it
    assert gone() is None, "the records of a run must not grow"


async def test_a_large_image_does_not_hold_up_the_others(codec, processor, monkeypatch):
    """While it is decoded, five small ones are shown; a second large one waits for it."""
    monkeypatch.setattr(images_module, "LARGE_PIXELS", 56 * 28)
    is_shown, running = threading.Event(), []

    class Waiting(type(processor)):
        def load(self, image):
            if image.width * image.height > 56 * 28:
                running.append(image)
                is_shown.wait(300)
                assert len(running) == 1
                running.pop()
            return super().load(image)

    images = RolloutImages(Waiting(processor.folder), codec.image_tokens)
    large = [
        asyncio.create_task(images.check(make_picture(seed, 56, 56), "large")) for seed in range(6)
    ]
    small = [await images.check(make_picture(seed), "small") for seed in range(5)]
    assert len(small) == 5 and not any(task.done() for task in large)
    is_shown.set()
    assert len(await asyncio.gather(*large)) == 6


async def test_pixels_are_decoded_once_and_bounded_in_bytes(codec, processor):
    class CountingProcessor:
        image_id = processor.image_id
        num_loads = 0

        def load(self, image):
            self.num_loads += 1
            return processor.load(image)

    counting = CountingProcessor()
    record = [processor.measure(make_picture(seed, 56, 56)) for seed in range(4)]
    size = 56 * 56 * 3 + len(record[0].data)
    images = RolloutImages(counting, codec.image_tokens, max_cache_bytes=2 * size + size // 2)
    placed = [PlacedImage(start=0, image=image) for image in record]
    await asyncio.gather(*(images.load(placed[:1]) for _ in range(5)))
    assert counting.num_loads == 1
    await images.load(placed[1:2])
    await images.load(placed[:1])
    await images.load(placed[2:3])  # drops the second one, which was used least recently
    await images.load(placed[:1])
    assert counting.num_loads == 3
    await images.load(placed[1:2])
    assert counting.num_loads == 4
    broken = replace(record[3], data=b"", path="nowhere.png", image_id="x")
    for _ in range(2):
        with pytest.raises(ToolSessionError):
            await images.load([PlacedImage(start=0, image=broken)])
