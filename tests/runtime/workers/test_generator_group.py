"""Routing and errors of the engine group, with small Ray actors in place of vLLM."""

import asyncio

import numpy as np
import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.workers.generator_group import EngineActor, GeneratorGroup
from mega_agentrl.runtime.workers.image_store import ImageStore, attach_images
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.records import GenerateRequest
from tests.runtime.fake_ranks import wait_until_dead


@ray.remote(num_cpus=0, max_concurrency=64)
class FakeEngine:
    """Answers with its index; `hang` never answers, `fail` raises."""

    def __init__(self, index):
        self.index = index
        self.calls = []

    async def reset(self):
        self.calls = []

    async def call(self, method, *args):
        self.calls.append((method, *args))
        if method == "generate" and "hang" in args[0].request_id:
            await asyncio.sleep(600)
        if method == "generate" and "fail" in args[0].request_id:
            raise RuntimeError("out of blocks")
        return self.index

    async def generate_with_images(self, request, pixel_refs):
        self.calls.append(request)
        whole = await attach_images(request, pixel_refs)
        return [placed.image.pixels_HWC for placed in whole.images]

    async def start(self, model_path, seed, deadline_s):
        pass

    async def recorded_calls(self):
        return self.calls


def group_of(actors, call_timeout_s=300.0):
    cluster = ClusterConfig(num_engines=len(actors), call_timeout_s=call_timeout_s)
    config = TrainConfig(cluster=cluster)
    return GeneratorGroup(actors, config, FakeEngine.remote)


@pytest.fixture(scope="module")
def pair(ray_local):
    """Two processes for all tests that leave them alive."""
    return [FakeEngine.remote(index) for index in range(2)]


@pytest.fixture
def actors(pair):
    ray.get([actor.reset.remote() for actor in pair], timeout=300)
    return pair


async def until_called(actor, what):
    """Wait until an engine received this call."""
    while what not in await actor.recorded_calls.remote():
        await asyncio.sleep(0.02)


def request(name):
    return GenerateRequest(request_id=name, token_ids=(1, 2), max_tokens=4)


async def test_prompt_stays_on_its_engine_and_new_prompts_spread(actors):
    engines = group_of(actors)
    first = asyncio.gather(*(engines.generate(request(f"a/{i}")) for i in range(4)))
    second = asyncio.gather(*(engines.generate(request(f"b/{i}")) for i in range(4)))
    engine_indices = [set(await first), set(await second)]
    assert engine_indices == [{0}, {1}]
    assert await engines.generate(request("b/9")) == 1


async def test_can_serve_while_one_engine_is_routable(actors):
    engines = group_of(actors)
    assert engines.can_serve
    engines.registry.routable.discard(0)
    assert engines.can_serve
    engines.registry.routable.discard(1)
    assert not engines.can_serve
    engines.enable_routing(0)
    assert engines.can_serve


async def test_deadline_and_failure_name_the_engine(actors):
    for engines, name in (
        (group_of(actors[:1], call_timeout_s=0.1), "hang/0"),
        (group_of(actors[:1]), "fail/0"),
    ):
        with pytest.raises(RemoteCallError) as caught:
            await engines.generate(request(name))
        assert (caught.value.operation, caught.value.processes) == ("generate", ("engine 0",))


def image_of(number, num_rows=28):
    pixels = np.full((num_rows, 28, 3), number, np.uint8)
    sizes = {"width": 28, "height": num_rows, "grid_thw": (1, num_rows // 14, 2), "merge_size": 2}
    return ImageInput(image_id=f"image {number}", data=b"file", pixels_HWC=pixels, **sizes)


def image_request(name, *images):
    placed = [PlacedImage(start=1 + index, image=image) for index, image in enumerate(images)]
    ids = tuple(range(len(images) + 2))
    return GenerateRequest(request_id=name, token_ids=ids, max_tokens=4, images=tuple(placed))


async def test_pixels_reach_the_engine_but_are_not_part_of_the_request(actors):
    engines = group_of(actors)
    one, two = image_of(1), image_of(2, 56)
    request = image_request("a/0", one, two, one)
    found = await engines.generate(request)
    for pixels, image in zip(found, (one, two, one), strict=True):
        np.testing.assert_array_equal(pixels, image.pixels_HWC)
    (seen,) = await actors[0].recorded_calls.remote()
    assert seen == request, "images are equal if their ids are"
    assert all(placed.image.pixels_HWC is None for placed in seen.images)
    assert not any(placed.image.data for placed in seen.images)


async def test_an_engine_knows_a_request_before_its_pixels_arrive():
    known = []

    class Engine:
        async def generate(self, request, load_images):
            known.append(request.request_id)
            return await load_images(request)

    actor = object.__new__(EngineActor)
    actor._engine = Engine()
    arrival = asyncio.get_running_loop().create_future()
    request, pixel_refs = ImageStore(put=lambda _: arrival).detach(
        image_request("a/0", image_of(1))
    )
    running = asyncio.create_task(actor.generate_with_images(request, pixel_refs))
    await asyncio.sleep(0)
    assert known == ["a/0"]
    arrival.set_result(image_of(1).pixels_HWC)
    (placed,) = (await running).images
    np.testing.assert_array_equal(placed.image.pixels_HWC, image_of(1).pixels_HWC)


def test_an_image_is_stored_once_until_there_is_no_room_for_it():
    stored = []

    def put(pixels):
        stored.append(int(pixels[0, 0, 0]))
        return f"ref {len(stored)}"

    size = image_of(0).pixels_HWC.nbytes
    store = ImageStore(max_bytes=2 * size, put=put)
    for numbers in ([1, 1], [2], [1], [3], [1]):
        store.detach(image_request("a/0", *map(image_of, numbers)))
    assert stored == [1, 2, 3]
    _, refs = store.detach(image_request("a/0", image_of(2), image_of(1)))
    assert stored == [1, 2, 3, 2]
    assert refs == {"image 2": "ref 4", "image 1": "ref 1"}


async def test_replaced_engine_gets_requests_once_routing_is_enabled(actors):
    old = FakeEngine.remote(1)
    engines = group_of([actors[0], old])
    engine_indices = await asyncio.gather(*(engines.generate(request(f"{key}/0")) for key in "ab"))
    assert engine_indices == [0, 1]
    engines._spawn_actor = lambda index: actors[1]
    engines.wait_started(engines.respawn_engine(1))
    assert engines.routable_engines == [0]
    # Its prompts move to the other engine, and stay there.
    assert {await engines.generate(request(f"{key}/1")) for key in "abcd"} == {0}
    await engines.pause()
    engines.enable_routing(1)
    assert await engines.generate(request("b/2")) == 0
    running = [asyncio.create_task(engines.generate(request(f"hang{n}/0"))) for n in range(2)]
    while not (calls := await actors[1].recorded_calls.remote()):
        await asyncio.sleep(0.02)
    assert len(calls) == 1
    for task in running:
        task.cancel()
    wait_until_dead(old.recorded_calls)


async def test_requests_fail_and_engines_die_once_the_group_is_closed(ray_local):
    actors = [FakeEngine.remote(0)]
    engines = group_of(actors)
    running = asyncio.create_task(engines.generate(request("hang/0")))
    await until_called(actors[0], ("generate", request("hang/0")))
    engines.close()
    engines.close()
    for call in (running, engines.generate(request("a/0"))):
        with pytest.raises(RemoteCallError):
            await call
    assert not engines.can_serve
    await engines.pause()
    with pytest.raises(RemoteCallError):
        engines.respawn_engine(0)
    wait_until_dead(actors[0].recorded_calls)


async def test_abort_reaches_the_engine_that_runs_the_request(actors):
    engines = group_of(actors)
    task = asyncio.create_task(engines.generate(request("hang/1")))
    await until_called(actors[0], ("generate", request("hang/1")))
    await engines.abort("hang/1")
    await engines.abort("unknown")
    task.cancel()
    await until_called(actors[0], ("abort", "hang/1"))
    assert not ray.get(actors[1].recorded_calls.remote())


def test_engines_sleep_together_and_one_that_fails_is_lost(actors):
    third = FakeEngine.remote(2)
    engines = group_of([*actors, third])
    engines.registry.routable.discard(1)
    engines.sleep()
    engines.wake_up("cache", [2])
    calls = ray.get([actor.recorded_calls.remote() for actor in (*actors, third)], timeout=300)
    assert calls == [[("sleep",)], [], [("sleep",), ("wake_up", "cache")]]
    engines.registry.new_engines.add(1)
    # On GPUs shared with the policy, a lost engine is killed at once.
    engines._config.cluster.colocated = True
    engines.report_lost(2, third, "it hangs")
    wait_until_dead(third.recorded_calls)
    engines.registry.lost_reasons.clear()
    engines.registry.routable.add(2)
    engines.sleep()
    assert engines.registry.lost_reasons.keys() == {2}
    assert engines.registry.live_engines == [0, 1]
    assert ("sleep",) in ray.get(actors[1].recorded_calls.remote(), timeout=300)
