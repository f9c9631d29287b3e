"""Swept keys, and the folder names of a sweep's jobs."""

import re

import pytest

from mega_agentrl.config.sweep_overrides import sweep_dir_name, swept_keys, without_swept


def test_keys_with_several_values_are_swept():
    overrides = ["algo=grpo,arpo", "seed=range(1,4)", "optim.lr=1e-6", "+reward.rubric.a.b=1,2"]
    assert swept_keys(overrides) == ["algo", "seed", "reward.rubric.a.b"]
    assert without_swept(overrides) == ["optim.lr=1e-6"]


@pytest.mark.parametrize(
    ("overrides", "keys", "name"),
    [
        (["experiment=smoke", "algo=arpo", "seed=1"], ["algo", "seed"], "arpo-seed1"),
        (["optim.lr=1e-6", "+reward.functions.f=reward.py\\:score"], ["optim.lr"], "lr1e-06"),
        (["optim.lr=0.1", "sft.lr=0.2"], ["optim.lr", "sft.lr"], "optim_lr0.1-sft_lr0.2"),
        (["algo=arpo", "reward=arpo"], ["algo", "reward"], "algo_arpo-reward_arpo"),
        (["data.train='/a b/c d.parquet'"], ["data.train"], "train_c_d.parquet"),
        (["algo.loss=my/loss.py:loss"], ["algo.loss"], "loss_loss.py_loss"),
        (["cluster.colocated=true"], ["cluster.colocated"], "colocated_true"),
        (["algo.kl_target=null"], ["algo.kl_target"], "kl_target_null"),
        (["optim.betas=[0.9,0.95]"], ["optim.betas"], "betas_0.9_0.95"),
        (["seed=1"], [], "defaults"),
        (["data.prompt_key='?'"], ["data.prompt_key"], "prompt_key"),
    ],
    ids=[
        *("group_and_seed", "fixed_override", "equal_last_part", "two_groups", "path", "code"),
        *("boolean", "null", "list", "no_key", "no_letter"),
    ],
)
def test_a_job_is_named_by_its_values_of_the_swept_keys(overrides, keys, name):
    assert sweep_dir_name(overrides, keys) == name
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", name)


def test_a_long_name_is_cut():
    keys = [f"tool.python.k{n}" for n in range(40)]
    name = sweep_dir_name([f"{key}=1" for key in keys], keys)
    assert len(name) <= 80 and name.startswith("k01-k11-")
