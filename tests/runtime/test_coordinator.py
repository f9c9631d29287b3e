"""What the coordinator decides, with recording stand-ins; `test_weight_sync` has real processes."""

from types import SimpleNamespace

import pytest

from mega_agentrl.runtime.coordinator import Coordinator
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.workers.engine_registry import EngineRegistry
from mega_agentrl.runtime.workers.gpu_time_sharing import GpuOwner, GpuTimeSharing, ModelTurns


class Recorder:
    """Both groups and the weight sync; records the calls in one list."""

    def __init__(self):
        self.calls, self.registry = [], EngineRegistry(1)

    def sync(self, engines, version, release_policy):
        self.calls.append(f"sync {version}")
        if release_policy is not None:
            release_policy()
        return {}

    def __getattr__(self, method):
        return lambda *args, **kwargs: self.calls.append(method)


def test_operations_get_the_gpus_and_engines_that_served_serve_again():
    both = Recorder()
    models = ModelTurns(both)
    gpus = GpuTimeSharing(models, SimpleNamespace(sleep=lambda: None, wake_up=lambda *_: None))
    coordinator = Coordinator(both, both, both, models, gpus)
    coordinator.reset_optimizer()
    assert both.calls == ["reset_optimizer"]  # the engines were not serving
    coordinator.sync_weights(both, 3)
    assert gpus.owner is GpuOwner.engines
    both.calls.clear()
    coordinator.reset_optimizer()
    assert both.calls == [
        *("set_gpu_resident", "reset_optimizer"),
        *("set_gpu_resident", "sync 3", "set_gpu_resident", "serve_version"),
    ]
    coordinator.gpu_name()
    assert gpus.owner is GpuOwner.engines
    coordinator.compute_log_probs(None)
    assert gpus.owner is GpuOwner.policy
    assert not coordinator._has_unsynced_weights
    coordinator.update(None)
    assert coordinator._has_unsynced_weights
    assert not coordinator.sync_new_engines([0])


class Critic:
    """A model on the policy's GPUs."""

    def __init__(self, calls):
        self.calls = calls

    def set_gpu_resident(self, parts):
        self.calls.append(f"critic has {len(parts)} parts")


def test_a_model_on_the_policys_gpus_takes_turns_with_the_policy():
    both = Recorder()
    coordinator = Coordinator(both, both, both, ModelTurns(both), None)
    critic = Critic(both.calls)
    with coordinator.reserve_gpus(critic):
        both.calls.append("critic starts")
    with coordinator.model_turn(critic, "compute_values"):
        both.calls.append("values")
    with coordinator.model_turn(critic, "save_result"):
        both.calls.append("files")
    coordinator.compute_log_probs(None)
    coordinator.update(None)
    with coordinator.model_turn(critic, "save_result"):
        both.calls.append("files")
    assert both.calls == [
        *("set_gpu_resident", "critic starts", "values", "files", "critic has 0 parts"),
        *("set_gpu_resident", "compute_log_probs", "update", "files"),
    ]
    both.calls.clear()
    with coordinator.model_turn(critic, "update"):
        pass
    assert both.calls == ["set_gpu_resident", "critic has 3 parts"]
    assert coordinator._has_unsynced_weights, "of the policy's update, not of the critic's"
    coordinator.sync_weights(both, 1)
    assert both.calls[2:] == ["critic has 0 parts", "set_gpu_resident", "sync 1", "serve_version"]
    with coordinator.model_turn(critic, "update"):
        assert not coordinator._has_unsynced_weights


def test_engines_that_served_while_the_critic_was_saved_serve_again():
    both = Recorder()
    models = ModelTurns(both)
    gpus = GpuTimeSharing(models, SimpleNamespace(sleep=lambda: None, wake_up=lambda *_: None))
    coordinator = Coordinator(both, both, both, models, gpus)
    coordinator.sync_weights(both, 3)
    critic = Critic(both.calls)
    with coordinator.reserve_gpus(critic):
        assert gpus.owner is GpuOwner.policy
    coordinator.sync_weights(both, 3)
    both.calls.clear()
    with coordinator.model_turn(critic, "start_save"):
        both.calls.append("save")
    assert both.calls == [
        *("critic has 3 parts", "save", "critic has 0 parts"),
        *("set_gpu_resident", "sync 3", "set_gpu_resident", "serve_version"),
    ]
    assert gpus.owner is GpuOwner.engines


def test_ranks_that_died_during_their_turn_are_not_offloaded_before_they_start_again():
    both = Recorder()
    coordinator = Coordinator(both, both, both, ModelTurns(both), None)

    class DeadCritic(Critic):
        def set_gpu_resident(self, parts):
            raise RemoteCallError("dead")

    dead = DeadCritic(both.calls)
    with coordinator.reserve_gpus(dead):
        pass
    with coordinator.reserve_gpus(dead):
        both.calls.append("starts again")
    assert both.calls == ["set_gpu_resident", "starts again"]


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "alive"])
def test_a_failed_sync_starts_over_if_an_engine_was_replaced_meanwhile(is_replaced):
    both = Recorder()
    coordinator = Coordinator(both, both, both, ModelTurns(both), None)
    coordinator._supervisor = SimpleNamespace(
        replace_lost_engines=lambda before: both.registry.num_handled_losses > before
    )
    failed = RemoteCallError("pause: engine 0 died")
    errors = iter([failed])

    def sync(engines, version, release_policy):
        for error in errors:
            if is_replaced:
                both.registry.mark_lost(0, "died")
                both.registry.mark_started(0)
            raise error
        return {"total_s": 1.0}

    both.sync = sync
    if is_replaced:
        assert coordinator.sync_weights(both, 1) == {"total_s": 1.0}
    else:
        with pytest.raises(RemoteCallError) as caught:
            coordinator.sync_weights(both, 1)
        assert caught.value is failed
    assert both.calls == ["disconnect", *["serve_version"] * is_replaced]
