"""States of the engines: a lost one gets no requests before it is replaced, or abandoned."""

from mega_agentrl.runtime.workers.engine_registry import MAX_ENGINE_RESTARTS, EngineRegistry


def test_lost_engine_gets_no_requests_until_it_is_replaced():
    registry = EngineRegistry(2)
    assert registry.mark_lost(1, "died")
    assert not registry.mark_lost(1, "died again"), "it is known"
    registry.enable_routing([0, 1])  # by a weight sync that has just ended
    assert (registry.routable, registry.live_engines) == ({0}, [0])
    assert registry.count_restart(1)
    registry.mark_started(1)
    assert (registry.new_engines, registry.live_engines) == ({1}, [0, 1])
    registry.enable_routing([1])
    registry.notify_waiters()
    assert (registry.routable, registry.new_engines) == ({0, 1}, set())
    assert registry.num_handled_losses == 1


def test_engine_that_never_serves_is_abandoned_but_serving_starts_the_count_anew():
    registry = EngineRegistry(1)
    for serves in (True, False):
        for _ in range(MAX_ENGINE_RESTARTS):
            assert registry.mark_lost(0, "no memory")
            assert registry.count_restart(0)
            registry.mark_started(0)
        if serves:
            registry.enable_routing([0])
            registry.notify_waiters()
    assert registry.mark_lost(0, "no memory")
    assert not registry.count_restart(0)
    assert not registry.mark_lost(0, "no memory"), "nobody replaces it"
    registry.enable_routing([0])
    assert (registry.live_engines, registry.num_abandoned) == ([], 1)
