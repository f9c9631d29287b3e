"""A scored tree per prompt in order, and errors that arrive unchanged."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.collector import collect_rollouts, make_prompt_keys
from tests.fakes import FakeGenerator, FakeRubric, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import END

PROMPTS = [make_prompt(f"set/{index}", question=f"Q{index}") for index in range(5)]


CONFIG = RolloutConfig(group_size=4, max_response_tokens=120)


def _collect(prompts=PROMPTS, *, rubric=None, config=CONFIG, **options):
    context = make_context(config, **options)
    return asyncio.run(collect_rollouts(prompts, rubric or FakeRubric(), context))


def test_a_scored_tree_per_prompt_in_order():
    trees = _collect()
    assert [tree.prompt.prompt_id for tree in trees] == [p.prompt_id for p in PROMPTS]
    rubric = FakeRubric()
    for one in (one for tree in trees for one in tree.trajectories):
        assert one.score == rubric.score(one)
    ids = [one.trajectory_id for tree in trees for one in tree.trajectories]
    assert len(set(ids)) == len(ids) == 20


def test_other_prompts_delays_and_order_do_not_matter():
    plain = _collect()
    other = _collect(PROMPTS[::-1], generator=FakeGenerator(delays=5), tools=FakeTools(delays=6))
    assert other[::-1] == plain
    assert _collect(PROMPTS[2:3]) == plain[2:3]


def test_seed_and_step_change_the_samples():
    plain = _collect()
    assert _collect(seed=2) != plain and _collect(step=1) != plain


def test_greedy_requests_have_no_seed_and_temperature_zero():
    generator = FakeGenerator(turns(END))
    config = RolloutConfig(group_size=1, branching=Branching.none)
    _collect(generator=generator, config=config, temperature=0.0)
    assert {(r.temperature, r.seed) for r in generator.requests} == {(0.0, None)}


def test_sampling_settings_reach_the_engine():
    generator = FakeGenerator(turns(END))
    config = RolloutConfig(group_size=1, temperature=0.7, top_p=0.9, top_k=5)
    _collect(PROMPTS[:1], generator=generator, config=config)
    (request,) = generator.requests
    assert (request.temperature, request.top_p, request.top_k) == (0.7, 0.9, 5)
    assert request.stop == ("</search>", "</python>")
    assert request.request_id.split("/")[0] == "set_0", "requests of a prompt share a first part"


def test_a_repeated_prompt_is_sampled_anew():
    first, second = _collect([PROMPTS[0], PROMPTS[0]])
    assert [o.token_ids for o in first.trajectories] != [o.token_ids for o in second.trajectories]
    assert make_prompt_keys([PROMPTS[0], PROMPTS[1], PROMPTS[0]]) == ["set_0", "set_1", "set_0#1"]


def test_a_failed_trajectory_has_no_score_and_the_others_do():
    def breaks(request):
        return "set_1/" in request.request_id

    trees = _collect(generator=FakeGenerator(turns(END), breaks=breaks))
    for index, tree in enumerate(trees):
        assert len(tree.trajectories) == 4
        assert all(one.failed == (index == 1) for one in tree.trajectories)
        assert all((one.score is None) == (index == 1) for one in tree.trajectories)


def test_a_bug_arrives_as_itself_and_nothing_stays_open():
    class Broken(FakeRubric):
        def score(self, trajectory):
            raise KeyError("wrong_name")

    tools = FakeTools(delays=1)
    with pytest.raises(KeyError) as caught:
        _collect(rubric=Broken(), tools=tools)
    assert caught.value.args == ("wrong_name",)
    assert all(session.released >= 1 for session in tools.sessions)
    with pytest.raises(ZeroDivisionError):
        _collect(tools=FakeTools(answer=lambda text: 1 / 0))


def test_a_prompt_that_fills_the_model_is_named():
    with pytest.raises(InputError) as caught:
        _collect(max_model_len=3)
    assert (caught.value.name, caught.value.got) == ("tokens of prompt set/0", 3)
