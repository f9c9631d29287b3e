"""Every algorithm is a checked configuration that shares all parts with the others."""

from dataclasses import replace
from pathlib import Path

import pytest

from mega_agentrl.config.enums import AdvantageEstimator, AresMode, Branching, CotBlocks, LrSchedule
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
    assert algo["arpo_hard"].advantage is AdvantageEstimator.arpo_hard
    assert algo["arpo"].advantage is algo["grpo"].advantage is AdvantageEstimator.grpo
    assert (algo["arpo_egpo"].egpo.lam, algo["arpo_egpo"].egpo.cot_blocks) == (
        0.4,
        CotBlocks.response,
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
        "algo.egpo.cot_blocks",
        "algo.ares.mode",
        "rollout.branching",
    }


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("engine", {"max_num_seqs": 3}, "got other settings in engine, expected them"),
        (
            "optim",
            {"lr_schedule": LrSchedule.linear},
            r"optim\.lr_schedule=linear: expected constant",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(section, change, message, configs):
    base, _ = configs["base"]
    changed = replace(base, **{section: replace(getattr(base, section), **change)})
    with pytest.raises(ValueError, match=message):
        check_run(changed, changed if section == "optim" else base)


def test_a_bootstrap_is_refused(configs):
    ares, _ = configs["ares"]
    algo = replace(ares.algo, ares=replace(ares.algo.ares, bootstrap=True))
    with pytest.raises(ValueError, match=r"algo\.ares\.bootstrap=True: expected false"):
        check_run(replace(ares, algo=algo), configs["base"][0])


def test_a_critic_is_refused(configs):
    config, _ = configs["grpo"]
    algo = replace(config.algo, advantage=AdvantageEstimator.gae)
    with pytest.raises(ValueError, match=r"algo\.advantage=gae: expected one without a critic"):
        check_run(replace(config, algo=algo), configs["base"][0])


def test_rollouts_ahead_are_refused(configs):
    config, _ = configs["grpo"]
    rollout = replace(config.rollout, max_staleness=1)
    with pytest.raises(ValueError, match=r"rollout\.max_staleness=1: expected 0 in a comparison"):
        check_run(replace(config, rollout=rollout), configs["base"][0])


def test_a_misspelt_override_names_the_nearest_key():
    with pytest.raises(ValueError, match=r"nearest known is 'optim\.lr'"):
        make_config(["optm.lr=1"], run_dir=Path("x"))


def test_differing_keys_by_hand():
    one = {"a": 1, "b": {"c": 2, "d": [1]}, "only": None}
    other = {"a": 1, "b": {"c": 3, "d": [1]}, "new": 5}
    assert differing(one, other) == ["b.c", "new"]
    assert differing(one, one) == []
