"""Every preset and estimator, with the real policy: what was rewarded becomes more probable."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mega_agentrl.config.algorithm_traits import ESTIMATORS
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.types.batch import TrainBatch
from tests.actor.training.learning_jobs import learn

pytest.importorskip("hydra", reason="the presets are composed by Hydra")

from tests.config.presets import PRESETS, preset

OPEN, CLOSE, ANSWER = 1, 2, 3
ALGOS = {name: preset(name).algo for name in PRESETS}
ALGOS |= {
    name: AlgoConfig(advantage=name)
    for name in ESTIMATORS.registered()
    if name not in {algo.advantage for algo in ALGOS.values()}
}
QUICK = ("grpo", "ppo", "gspo", "aepo", "ares", "fork_credit")
"""Group, critic, sequence ratio, entropy, stepwise and tree advantages."""
EXTENDED = tuple(name for name in ALGOS if name not in QUICK)
REWARDS = (1.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def groups():
    """Return two prompts with four answers, the first of which is right.

    An answer is a turn with a chain of thought, a token of the tool, and a second turn; the first
    two answers share the first turn.
    """
    generator = torch.Generator().manual_seed(5)
    num_rows, width = 2 * len(REWARDS), 9
    response_BT = torch.randint(10, 60, (num_rows, width), generator=generator)
    response_BT[:, 0], response_BT[:, 3], response_BT[:, 4] = OPEN, CLOSE, ANSWER
    token_BT = torch.arange(num_rows * width).view(num_rows, width)
    for first in (0, len(REWARDS)):
        response_BT[first + 1, :5] = response_BT[first, :5]
        token_BT[first + 1, :5] = token_BT[first, :5]
    mask_BT = torch.ones(num_rows, width, dtype=torch.bool)
    mask_BT[:, 4] = False
    zeros_BT = torch.zeros(num_rows, width)
    prompts = [tuple(torch.randint(10, 60, (4,), generator=generator).tolist()) for _ in range(2)]
    return TrainBatch(
        prompt_ids=tuple(prompts[row // len(REWARDS)] for row in range(num_rows)),
        response_BT=response_BT,
        length_B=torch.full((num_rows,), width),
        mask_BT=mask_BT,
        group_B=torch.arange(num_rows) // len(REWARDS),
        reward_B=torch.tensor(REWARDS * 2),
        tree_token_BT=token_BT,
        rollout_logp_BT=zeros_BT,
        rollout_entropy_BT=zeros_BT,
        version_BT=torch.zeros_like(response_BT),
        baseline_B=torch.full((num_rows,), 0.25),
        value_BT=torch.full((num_rows, width), 0.25),
    )


@pytest.fixture(scope="module")
def learned(rank_pool, train_config, checkpoints, groups):
    """Return a function to the change of each token's log-prob, [B, T], by preset or estimator.

    The first call of a circle computes those of all its algorithms.
    """
    config = train_config(checkpoints[True])

    @cache
    def changes(names):
        algos = [ALGOS[name] for name in names]
        (found,) = rank_pool.run(learn, 1, config, groups, algos, ((OPEN,), (CLOSE,)))
        return {name: after - before for name, (before, after) in zip(names, found, strict=True)}

    return lambda name: changes(QUICK if name in QUICK else EXTENDED)[name]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.extended) for n in EXTENDED)]
)
def test_the_rewarded_answer_becomes_more_probable(name, learned, groups):
    own_BT = groups.mask_BT.clone()
    own_BT[:, :5] = False  # the turn that an answer does not share
    change_BT = learned(name)
    for first in (0, len(REWARDS)):
        changes = [
            float(change_BT[row][own_BT[row]].mean()) for row in range(first, first + len(REWARDS))
        ]
        assert changes[0] > 0, changes
        assert changes[0] == max(changes), changes
