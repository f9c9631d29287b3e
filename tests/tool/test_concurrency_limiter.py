"""The limiter: at most `limit` at once, in order of arrival, over loops and cancellations."""

import asyncio
import random
import threading

import pytest

from mega_agentrl.tool.concurrency_limiter import ConcurrencyLimiter


async def test_the_limit_holds_and_the_order_is_of_arrival():
    slots, running, most, order = ConcurrencyLimiter(2), 0, 0, []

    async def use(number):
        nonlocal running, most
        await slots.acquire(None)
        running += 1
        most = max(most, running)
        order.append(number)
        await asyncio.sleep(0.001)
        running -= 1
        slots.release()

    await asyncio.gather(*(use(number) for number in range(12)))
    assert most == 2
    assert order == list(range(12))


async def test_waiting_has_a_bound_and_leaves_no_trace():
    slots = ConcurrencyLimiter(1)
    await slots.acquire(None)
    with pytest.raises(TimeoutError):
        await slots.acquire(0.01)
    slots.release()
    await slots.acquire(0.01)


async def test_random_cancellations_lose_and_invent_no_slot():
    slots, running, most = ConcurrencyLimiter(3), 0, 0
    rng = random.Random(1)

    async def use():
        nonlocal running, most
        await slots.acquire(None)
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(rng.random() * 0.002)
        finally:
            running -= 1
            slots.release()

    tasks = [asyncio.create_task(use()) for _ in range(300)]
    for task in rng.sample(tasks, 150):
        await asyncio.sleep(rng.random() * 0.0005)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3
    for _ in range(3):
        await slots.acquire(0.5)
    with pytest.raises(TimeoutError):
        await slots.acquire(0.01)


async def test_a_slot_that_is_handed_to_somebody_who_leaves_goes_on():
    slots = ConcurrencyLimiter(1)
    await slots.acquire(None)
    leaver = asyncio.create_task(slots.acquire(None))
    stayer = asyncio.create_task(slots.acquire(None))
    await asyncio.sleep(0)
    slots.release()  # the leaver has it, and does not know yet
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    await asyncio.wait_for(stayer, 60)


def test_the_limit_holds_over_event_loops():
    slots, lock, running, most = ConcurrencyLimiter(2), threading.Lock(), 0, 0

    async def use():
        nonlocal running, most
        for _ in range(20):
            await slots.acquire(10)
            with lock:
                running += 1
                most = max(most, running)
            await asyncio.sleep(0.0005)
            with lock:
                running -= 1
            slots.release()

    async def both():
        await asyncio.gather(use(), use())

    threads = [threading.Thread(target=asyncio.run, args=(both(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert most == 2


async def test_no_limit_and_a_wrong_one():
    free = ConcurrencyLimiter(None)
    for _ in range(100):
        await free.acquire(0)
    free.release()
    with pytest.raises(ValueError, match="max_concurrent=0: expected at least 1"):
        ConcurrencyLimiter(0)
