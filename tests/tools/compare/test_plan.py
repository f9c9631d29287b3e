"""Every preset is a checked configuration that shares all parts, or is skipped with a reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from mega_agentrl.config.enums import AresMode, Branching, LrSchedule
from mega_agentrl.errors import InputError
from mega_agentrl.estimate.preflight.suggestions import with_overrides
from tests.config.refusals import refused_setting
from tests.e2e.overrides import asset_overrides
from tools.compare.budget import Budget
from tools.compare.plan import (
    TASKS,
    CompareOptions,
    check_overrides,
    check_run,
    differing_keys,
    find_skip_reason,
    list_presets,
    make_algorithm_config,
    make_component_config,
    make_task_config,
    plan_run,
)

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def options(assets):
    given = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    return CompareOptions(
        out=Path("runs/x").resolve(),
        seeds=(1, 2),
        learning_rates=(1e-4, 2e-4),
        tuning_seed=9,
        budget=Budget(num_tokens=500, num_steps=None, num_evaluations=2),
        save_every=2,
        overrides=tuple(given),
    )


@pytest.fixture(scope="module")
def base(options):
    return make_task_config(TASKS["toolqa"], options)


@pytest.fixture(scope="module")
def checked(options):
    """Every preset on tool-QA."""
    return {
        name: make_algorithm_config(TASKS["toolqa"], options, name)
        for name in (*list_presets(), "arpo+algo.egpo.lam=0.3")
    }


def test_the_presets_are_all_of_the_folder_and_the_baseline_is_first():
    names = list_presets()
    assert names[0] == "grpo" and names[1:] == sorted(names[1:])
    assert set(names) == {path.stem for path in Path("configs/algo").glob("*.yaml")}


def test_algorithms_are_what_their_names_say(checked):
    algo = {name: one.config.algo for name, one in checked.items()}
    assert algo["arpo_hard"].advantage == "arpo_hard"
    assert algo["ares"].ares.mode is AresMode.paper and algo["ares"].kl_coef > 0
    added = algo["arpo+algo.egpo.lam=0.3"]
    assert (added.egpo.lam, algo["arpo"].egpo.lam) == (0.3, 0.0)
    assert checked["arpo+algo.egpo.lam=0.3"].config.rollout.branching is Branching.after_result


def test_all_presets_run_on_tool_qa(checked, base):
    reasons = {name: find_skip_reason(one.config, base.config) for name, one in checked.items()}
    assert set(reasons.values()) == {None}


def test_only_a_critic_needs_other_components(checked, base):
    built = {name: make_component_config(one.config, base.config) for name, one in checked.items()}
    assert [name for name, config in built.items() if config is not base.config] == ["ppo"]
    assert built["ppo"].algo.needs_critic
    assert built["ppo"].optim == replace(base.config.optim, critic_lr=1e-3)
    assert replace(built["ppo"], algo=base.config.algo, optim=base.config.optim) == base.config


@pytest.mark.parametrize(
    ("algorithm", "changes", "fact"),
    [
        ("arpo", {"rollout.max_tool_calls": 0}, "forks after a tool's answer"),
        ("fork_credit", {"rollout.max_tool_calls": 0}, "forks after a tool's answer"),
        ("gigpo", {"rollout.max_turns": 1}, "compares turns"),
        ("grpo", {"engine.max_num_seqs": 3}, "engine"),
        ("ares", {"algo.ares.bootstrap": True}, "algo.ares.bootstrap"),
        ("grpo", {"rollout.max_staleness": 1}, "rollout.max_staleness"),
    ],
    ids=["no tool", "no fork", "one turn", "shared part", "bootstrap", "staleness"],
)
def test_an_algorithm_that_cannot_be_compared_has_a_reason(algorithm, changes, fact, checked, base):
    changed = with_overrides(checked[algorithm].config, changes)
    assert fact in find_skip_reason(changed, base.config)
    assert find_skip_reason(checked[algorithm].config, base.config) is None


def test_forks_after_user_messages_need_no_tool(checked, base):
    changes = {
        "rollout.max_tool_calls": 0,
        "rollout.interaction_config_file": "users.yaml",
        "rollout.branch.after_user_messages": True,
    }
    assert find_skip_reason(with_overrides(checked["arpo"].config, changes), base.config) is None


def test_a_schedule_over_a_number_of_steps_is_refused(base):
    changed = with_overrides(base.config, {"optim.lr_schedule": LrSchedule.linear})
    assert refused_setting(check_run, changed, changed) == ("optim.lr_schedule", LrSchedule.linear)


def test_a_run_has_its_own_seed_rate_folder_and_settings(checked, options):
    scored = plan_run("arpo", checked["arpo"], options, seed=2, learning_rate=3e-4)
    tuning = plan_run("arpo", checked["arpo"], options, seed=9, learning_rate=1e-4, is_tuning=True)
    assert (scored.config.seed, scored.config.optim.lr) == (2, 3e-4)
    assert scored.config.run_dir.endswith("runs/x/toolqa/runs/arpo-lr0.0003-seed2")
    assert tuning.config.run_dir.endswith("runs/x/toolqa/tuning/arpo-lr0.0001-seed9")
    assert differing_keys(scored.settings, tuning.settings) == ["optim.lr", "seed"]
    assert scored.settings["optim"]["lr"] == 3e-4
    assert scored.settings["budget"]["num_tokens"] == 500
    assert "run_dir" not in scored.settings


@pytest.mark.parametrize("override", ["algo=arpo", "experiment=smoke", "seed=3", "optim.lr=1e-4"])
def test_settings_that_the_comparison_chooses_are_refused_as_overrides(override):
    with pytest.raises(InputError) as caught:
        check_overrides([override])
    assert (caught.value.name, caught.value.got) == (override, override.split("=")[0])
    check_overrides(["algo.kl_coef=0.1", "optim.num_minibatches=1"])


def test_differing_keys_are_those_with_other_values_on_both_sides():
    one = {"a": 1, "b": {"c": 2, "d": [1]}, "only": None}
    other = {"a": 1, "b": {"c": 3, "d": [1]}, "new": 5}
    assert differing_keys(one, other) == ["b.c", "new"]
    assert differing_keys(one, one) == []
