"""Every algorithm is a checked configuration that shares all parts with the others."""

import re
from pathlib import Path

import pytest

from mega_agentrl.config.enums import AresMode, Branching, CotBlocks, LrSchedule
from mega_agentrl.estimate.preflight.suggestions import with_overrides
from tests.e2e.overrides import asset_overrides
from tools.compare.variants import VARIANTS, check_run, differing, make_config


@pytest.fixture(scope="module")
def configs(assets):
    """(configuration, settings) by algorithm, and of none under "base"."""
    given = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    made = {
        key: make_config((*given, *variant.overrides), run_dir=Path("runs/x"), seed=2)
        for key, variant in VARIANTS.items()
    }
    return made | {"base": make_config(given, run_dir=Path("runs/base"))}


def test_the_algorithms_are_what_their_names_say(configs):
    algo = {key: config.algo for key, (config, _) in configs.items()}
    forks = {key: config.rollout.branching for key, (config, _) in configs.items()}
    assert algo["arpo_hard"].advantage == "arpo_hard"
    assert algo["arpo"].advantage == algo["grpo"].advantage == "grpo"
    assert (algo["arpo_egpo"].egpo.lam, algo["arpo_egpo"].egpo.cot_blocks) == (
        0.4,
        CotBlocks.first,
    )
    assert algo["ares"].ares.mode is AresMode.paper
    assert [key for key in VARIANTS if algo[key].egpo.lam > 0] == ["arpo_egpo"]
    assert [key for key in VARIANTS if algo[key].ares.mode is not AresMode.off] == ["ares"]
    assert {key for key in VARIANTS if forks[key] is Branching.after_result} == {
        "arpo",
        "arpo_hard",
        "arpo_egpo",
    }


@pytest.mark.parametrize("key", VARIANTS)
def test_every_algorithm_can_share_the_parts(key, configs):
    config, settings = configs[key]
    check_run(config, configs["base"][0])
    assert config.seed == settings["seed"] == 2
    assert Path(config.run_dir).is_absolute()
    assert "run_dir" not in settings
    assert set(differing(settings, configs["base"][1])) <= {
        "seed",
        "algo.advantage",
        "algo.kl_coef",
        "algo.egpo.lam",
        "algo.ares.mode",
        "rollout.branching",
    }


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ("grpo", "engine.max_num_seqs", 3),
        ("ares", "algo.ares.bootstrap", True),
        ("grpo", "algo.advantage", "gae"),
        ("grpo", "rollout.max_staleness", 1),
    ],
    ids=["shared part", "bootstrap", "critic", "staleness"],
)
def test_a_run_that_cannot_be_compared_is_refused(algorithm, key, value, configs):
    changed = with_overrides(configs[algorithm][0], {key: value})
    with pytest.raises(ValueError, match="engine" if key.startswith("engine") else re.escape(key)):
        check_run(changed, configs["base"][0])


def test_a_schedule_over_a_number_of_steps_is_refused(configs):
    changed = with_overrides(configs["base"][0], {"optim.lr_schedule": LrSchedule.linear})
    with pytest.raises(ValueError, match=r"optim\.lr_schedule"):
        check_run(changed, changed)


def test_differing_keys_by_hand():
    one = {"a": 1, "b": {"c": 2, "d": [1]}, "only": None}
    other = {"a": 1, "b": {"c": 3, "d": [1]}, "new": 5}
    assert differing(one, other) == ["b.c", "new"]
    assert differing(one, one) == []
