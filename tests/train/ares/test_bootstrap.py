"""`train.ares.bootstrap`: one batch out of all chunks, wherever the pass was interrupted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mega_agentrl.algo import ares
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.config.enums import AresMode
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.train.ares.bootstrap import (
    BOOTSTRAP_FILE,
    compute_bootstrap_state,
    format_bootstrap_summary,
    run_bootstrap,
)
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.entropy_stats_file import EntropyStatsFile
from mega_agentrl.train.controllers import Controllers
from tests.fakes import FakeGenerator, make_context, make_prompt
from tests.through_json import through_json
from tests.train.entropy_trees import path, steady, tree

NUM_PROMPTS, CHUNK = 8, 3


class KilledError(Exception):
    """Stands for a kill between two chunks."""


@pytest.fixture
def prompts():
    return [make_prompt(f"p{number}", f"Q{number}") for number in range(NUM_PROMPTS)]


@pytest.fixture(autouse=True)
def with_ares(config):
    config.algo.ares.mode = AresMode.paper
    config.data.prompts_per_step = CHUNK


def prompts_asked(generator):
    return {request.request_id.split("/")[0] for request in generator.requests}


def test_all_prompts_make_one_batch(components, config, prompts):
    done = []
    before = Controllers(adaptive_kl=AdaptiveKL(coef=0.1, target=0.1, horizon=10))
    after = run_bootstrap(components, config, prompts, before, lambda *at: done.append(at))
    assert done == [(1, 3), (2, 3), (3, 3)] and after.adaptive_kl == before.adaptive_kl
    context = make_context(
        config.rollout,
        max_model_len=config.engine.max_model_len,
        seed=config.seed,
        step="bootstrap",
    )
    trees = asyncio.run(collect_rollouts(prompts, components.rubric, context))
    entropy_stats = collect_entropy_stats(trees, None)
    threshold = float(entropy_stats.entropy_p95_B.double().quantile(0.5))
    stats = ares.AresStats(
        prompt_ids=entropy_stats.prompt_ids,
        correct_B=entropy_stats.is_correct_B,
        hwe_B=entropy_stats.hwe_count_B(threshold),
        p95_B=entropy_stats.entropy_p95_B,
    )
    assert after.ares.threshold == pytest.approx(threshold)
    assert after.ares == replace(ares.update(ares.AresState(), stats), betas=None)
    assert set(after.ares.difficulty_by_prompt) == {prompt.prompt_id for prompt in prompts}
    codes = set(after.ares.difficulty_by_prompt.values())
    assert len(codes) > 1, "the language has right and wrong answers"
    assert set(after.mastery.correct_streaks) == set(after.ares.difficulty_by_prompt)
    assert max(after.mastery.correct_streaks.values(), default=0) <= 1
    assert all(one.released for one in components.tools.sessions)


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3])
def test_a_killed_pass_goes_on_behind_its_last_chunk(components, config, prompts, num_chunks):
    expected = run_bootstrap(components, config, prompts, Controllers())
    file = components.run_dir / BOOTSTRAP_FILE
    file.unlink()

    def kill(num_done, num_all):
        if num_done == num_chunks:
            raise KilledError

    if num_chunks:
        with pytest.raises(KilledError):
            run_bootstrap(components, config, prompts, Controllers(), kill)
        with file.open("ab") as cut:
            cut.write(file.read_bytes()[:99])
    components.generator = FakeGenerator()
    assert run_bootstrap(components, config, prompts, Controllers()) == expected
    left = prompts[num_chunks * CHUNK :]
    assert prompts_asked(components.generator) == {prompt.prompt_id for prompt in left}
    components.generator = FakeGenerator()
    assert run_bootstrap(components, config, prompts, Controllers()) == expected
    assert not components.generator.requests, "a pass that is over is not made again"


def test_a_bootstrap_pass_with_other_settings_is_refused(components, config, prompts):
    run_bootstrap(components, config, prompts, Controllers())
    config.rollout.temperature = 0.5
    with pytest.raises(InputError) as caught:
        run_bootstrap(components, config, prompts, Controllers())
    assert caught.value.got == "rollout.temperature=1.0, not 0.5"
    config.rollout.temperature = 1.0
    with pytest.raises(InputError) as caught:
        run_bootstrap(components, config, prompts[::-1], Controllers())
    assert caught.value.got.startswith("data.train=")


def test_the_bootstrap_state_depends_on_neither_chunks_nor_failed_trajectories(tmp_path):
    trees = [
        tree("a", *[path(1, steady(4))] * 8, path(None, steady(90))),
        tree("b", *[path(0, steady(8))] * 8),
        tree("c", *[path(1, steady(2, entropy=1.0))] * 8),
        tree("d", path(None, steady(3))),
    ]
    ends = []
    for name, cuts in {"one": [trees], "four": [[one] for one in trees[::-1]]}.items():
        file = EntropyStatsFile(tmp_path / name, {}, len(cuts))
        for cut in cuts:
            file.append(collect_entropy_stats(cut, None))
        ends.append(compute_bootstrap_state(file, ares.PAPER_HYPERPARAMS))
    assert ends[0].mastery.last_entropies == {"a": 3.0, "b": 3.0, "c": 1.0}
    for end in ends:
        state = end.ares
        assert state.difficulty_by_prompt == {"a": 0, "b": 2, "c": 0} and state.threshold == 3.0
        # Easy are a and c: 4 windows at 3 nats, or none. Nobody was right about b.
        assert state.targets == (2.0, None, None) and state.alphas == (0.5,) * 3
    shown = format_bootstrap_summary(Controllers(ares=state))
    for fact in ("2 easy (target 2.0 windows)", "0 medium", "1 hard", "threshold 3.000"):
        assert fact in shown


def test_a_bootstrap_pass_of_failures_gives_the_initial_controllers(components, config, prompts):
    components.generator = FakeGenerator(breaks=lambda request: True)
    after = run_bootstrap(components, config, prompts, Controllers())
    assert after == Controllers()
    assert "threshold none" in format_bootstrap_summary(after)
    assert through_json(after) == after


def test_only_windows_behind_trigger_tokens_count(components, config, prompts):
    everywhere = run_bootstrap(components, config, prompts, Controllers())
    (components.run_dir / BOOTSTRAP_FILE).unlink()
    components.trigger_ids = frozenset({ord("a")})
    behind_a = run_bootstrap(components, config, prompts, Controllers())
    assert behind_a.ares.threshold == everywhere.ares.threshold
    pairs = zip(behind_a.ares.targets, everywhere.ares.targets, strict=True)
    known = [(few, many) for few, many in pairs if many is not None]
    assert known and all(few <= many for few, many in known)
    assert sum(few for few, _ in known) < sum(many for _, many in known)
