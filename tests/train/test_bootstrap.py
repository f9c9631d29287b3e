"""`train.bootstrap`: one batch out of all chunks, wherever the pass was interrupted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mega_agentrl.algo import ares
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.config.choices import AresMode
from mega_agentrl.rollout.collector import collect
from mega_agentrl.train.bootstrap import bootstrap, conclude, described
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.train.seen import observe
from mega_agentrl.train.seen_file import SeenFile
from tests.fakes import FakeGenerator, make_prompt
from tests.train.hesitant_trees import path, steady, tree

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


def test_all_prompts_make_one_batch(parts, config, prompts):
    done = []
    before = Controllers(kl=AdaptiveKL(coef=0.1, target=0.1, horizon=10))
    after = bootstrap(parts, config, prompts, before, lambda *at: done.append(at))
    assert done == [(1, 3), (2, 3), (3, 3)] and after.kl == before.kl
    trees = parts.wait(
        collect(
            prompts,
            generator=FakeGenerator(),
            tools=parts.tools,
            codec=parts.codec,
            rubric=parts.rubric,
            config=config.rollout,
            max_model_len=config.engine.max_model_len,
            seed=config.seed,
            step="bootstrap",
        )
    )
    seen = observe(trees, None)
    threshold = float(seen.p95_B.double().quantile(0.5))
    stats = ares.AresStats(
        prompt_ids=seen.prompt_ids,
        correct_B=seen.correct_B,
        hwe_B=seen.hwe_B(threshold),
        p95_B=seen.p95_B,
    )
    assert after.ares.threshold == pytest.approx(threshold)
    assert after.ares == replace(ares.update(ares.AresState(), stats), betas=None)
    assert set(after.ares.difficulty) == {prompt.prompt_id for prompt in prompts}
    assert len(set(after.ares.difficulty.values())) > 1, "the language has right and wrong answers"
    assert set(after.mastery.streaks) == set(after.ares.difficulty)
    assert max(after.mastery.streaks.values(), default=0) <= 1
    assert all(one.released for one in parts.tools.sessions)


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3])
def test_a_killed_pass_goes_on_behind_its_last_chunk(parts, config, prompts, num_chunks):
    expected = bootstrap(parts, config, prompts, Controllers())
    file = parts.run_dir / "bootstrap.jsonl"
    file.unlink()

    def kill(num_done, num_all):
        if num_done == num_chunks:
            raise KilledError

    if num_chunks:
        with pytest.raises(KilledError):
            bootstrap(parts, config, prompts, Controllers(), kill)
        with file.open("a") as cut:
            cut.write('{"chunk": 7, "ids": ["p')
    parts.generator = FakeGenerator()
    assert bootstrap(parts, config, prompts, Controllers()) == expected
    left = prompts[num_chunks * CHUNK :]
    assert prompts_asked(parts.generator) == {prompt.prompt_id for prompt in left}
    parts.generator = FakeGenerator()
    assert bootstrap(parts, config, prompts, Controllers()) == expected
    assert not parts.generator.requests, "a pass that is over is not made again"


def test_a_pass_of_other_settings_is_not_taken_for_this_one(parts, config, prompts):
    bootstrap(parts, config, prompts, Controllers())
    config.rollout.temperature = 0.5
    with pytest.raises(ValueError, match=r"rollout\.temperature=1\.0, not 0\.5"):
        bootstrap(parts, config, prompts, Controllers())
    config.rollout.temperature = 1.0
    with pytest.raises(ValueError, match=r"data\.train="):
        bootstrap(parts, config, prompts[::-1], Controllers())


def test_chunks_do_not_matter_and_neither_does_who_failed(tmp_path):
    trees = [
        tree("a", *[path(1, steady(4))] * 8, path(None, steady(90))),
        tree("b", *[path(0, steady(8))] * 8),
        tree("c", *[path(1, steady(2, entropy=1.0))] * 8),
        tree("d", path(None, steady(3))),
    ]
    ends = []
    for name, cuts in {"one": [trees], "four": [[one] for one in trees[::-1]]}.items():
        file = SeenFile(tmp_path / name, {}, len(cuts))
        for cut in cuts:
            file.append(observe(cut, None))
        ends.append(conclude(file, ares.PAPER))
    assert ends[0]["mastery"]["entropies"] == {"a": 3.0, "b": 3.0, "c": 1.0}
    for end in ends:
        state = ares.AresState.from_plain(end["ares"])
        assert state.difficulty == {"a": 0, "b": 2, "c": 0} and state.threshold == 3.0
        # Easy are a and c: 4 windows at 3 nats, or none. Nobody was right about b.
        assert state.targets == (2.0, None, None) and state.alphas == (0.5,) * 3
    shown = described(Controllers(ares=state))
    assert shown == (
        "bootstrap: 2 easy (target 2.0 windows), 0 medium, 1 hard; threshold 3.000 nats"
    )


def test_a_pass_of_failures_leaves_everything_unknown(parts, config, prompts):
    parts.generator = FakeGenerator(breaks=lambda request: True)
    after = bootstrap(parts, config, prompts, Controllers())
    assert after == Controllers()
    assert "threshold none" in described(after)
    assert json.loads(json.dumps(after.to_plain())) == after.to_plain()


def test_trigger_tokens_are_respected(parts, config, prompts):
    everywhere = bootstrap(parts, config, prompts, Controllers())
    (parts.run_dir / "bootstrap.jsonl").unlink()
    parts.trigger_ids = frozenset({ord("a")})
    behind_a = bootstrap(parts, config, prompts, Controllers())
    assert behind_a.ares.threshold == everywhere.ares.threshold
    known = [
        (few, many)
        for few, many in zip(behind_a.ares.targets, everywhere.ares.targets, strict=True)
        if many is not None
    ]
    assert known and all(few <= many for few, many in known)
    assert sum(few for few, _ in known) < sum(many for _, many in known)
