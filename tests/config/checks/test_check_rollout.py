"""Lengths that must fit each other, and settings that asynchronous rollouts exclude."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.checks.rollout import check_agent, check_lengths, check_staleness
from mega_agentrl.config.enums import Branching, CallProtocol, OldLogProbs, RolloutCorrection
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.schema import TrainConfig
from tests.config.refusals import refused, refused_setting


@pytest.fixture
def config():
    made = TrainConfig()
    made.rollout.max_staleness = 2
    made.algo.rollout_correction = RolloutCorrection.token_truncate
    return made


def test_staleness_with_a_correction_passes_silently(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_staleness(config)
        check_staleness(TrainConfig())
        config.algo.rollout_correction = RolloutCorrection.none
        config.algo.old_log_probs = OldLogProbs.engine
        check_staleness(config)


def test_staleness_without_a_correction_warns(config):
    config.algo.rollout_correction = RolloutCorrection.none
    with pytest.warns(
        UserWarning, match=r"rollout.max_staleness=2: .*algo.rollout_correction=token_truncate"
    ):
        check_staleness(config)


def test_partial_rollouts_are_refused(config):
    config.rollout.partial_rollout = True
    assert refused_setting(check_staleness, config) == ("rollout.partial_rollout", True)


def test_deterministic_runs_are_refused(config):
    config.deterministic = True
    assert refused_setting(check_staleness, config) == ("deterministic", True)
    config.rollout.max_staleness = 1
    check_staleness(config)
    config.weight_sync.in_flight = True
    assert refused_setting(check_staleness, config) == ("deterministic", True)


def test_weights_in_flight_need_asynchronous_rollouts(config):
    config.weight_sync.in_flight = True
    check_staleness(config)
    config.rollout.max_staleness = 0
    assert refused_setting(check_staleness, config) == ("weight_sync.in_flight", True)


def lengths(prompt, response, model_len, budget, context=1):
    made = TrainConfig()
    made.data.max_prompt_tokens, made.rollout.max_response_tokens = prompt, response
    made.engine.max_model_len, made.optim.micro_batch_tokens = model_len, budget
    made.parallel.context = context
    return made


def set_lengths(config, solution):
    for key, value in solution.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)


LENGTHS = {
    "model_too_short": (lengths(1024, 2048, 2048, 2048), 1024, 3, (341, 683, 1024, 2048)),
    "engine_too_short": (lengths(1024, 2048, 1024, 16384), 4096, 1, (1024, 2048, 3072, 16384)),
    "budget_too_small": (lengths(1024, 2048, 3072, 1024, 2), 4096, 1, (1024, 2048, 3072, 1536)),
    "engine_too_long": (lengths(100, 200, 5000, 1000), 4096, 1, (100, 200, 4096, 1000)),
    "response_too_long": (lengths(100, 5000, 6000, 2000), 1024, 2, (100, 924, 1024, 2000)),
    "everything": (lengths(4000, 4000, 10, 10), 1000, 3, (500, 500, 1000, 1000)),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_conflicts_of_lengths_come_at_once_with_values_that_fit(case):
    config, max_positions, num_conflicts, fitting = LENGTHS[case]
    error = refused(check_lengths, config, max_positions)
    assert len(error.expected.split("; and ")) == num_conflicts
    assert error.solution
    set_lengths(config, error.solution)
    assert fitting == (
        config.data.max_prompt_tokens,
        config.rollout.max_response_tokens,
        config.engine.max_model_len,
        config.optim.micro_batch_tokens,
    )
    check_lengths(config, max_positions)


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 9000), min_size=4, max_size=4),
    st.integers(1, 4),
    st.integers(2, 5000),
    st.booleans(),
)
def test_the_values_that_fit_pass(sizes, context, max_positions, by_turn):
    config = lengths(*sizes, context)
    config.rollout.use_inference_chat_template = by_turn
    try:
        check_lengths(config, max_positions)
    except ConfigError as error:
        set_lengths(config, error.solution)
    check_lengths(config, max_positions)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("call_protocol", CallProtocol.tags),
        ("interaction_config_file", "users.yaml"),
        ("partial_rollout", True),
        ("use_inference_chat_template", True),
        ("branching", Branching.released),
    ],
    ids=["tags", "users", "pauses", "template", "rounds"],
)
def test_agent_excludes_settings_of_the_native_loop(key, value):
    config = TrainConfig()
    config.rollout.agent = {"_target_": "agent.py:run"}
    config.rollout.call_protocol = CallProtocol.hermes
    check_agent(config)
    setattr(config.rollout, key, value)
    assert refused_setting(check_agent, config) == (f"rollout.{key}", value)
    config.rollout.agent = {}
    check_agent(config)
