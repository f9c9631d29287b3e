"""Bias and noise of every advantage estimator, in games whose true policy gradient is known.

    python tools/bench_credit.py [--quick] [--cases PATTERN,...] [--batches N] [--turns N]
        [--seed N]

A batch has 16 groups. Each is a prompt of its own, where the reward is easier or harder to get: its
probability is half of the game's, plus a number from 0 to 0.5 that is the prompt's. Each has
`--turns` sampled turns (a shared prefix of forks counts once), so that all estimators see equally
many sampled tokens. *flat*: every trajectory starts at the prompt. *forked*: half of the turns are
roots; the other half continue a random trajectory from a random turn on. The estimators are those
of training, called as in training: all that are registered, with their default options, and
`VARIANTS`, with the settings of a preset or another option. The gradient is the sum over all rows
of advantage times score function.

Three cases for each game, estimator and way of sampling, less is better:

* bias: 1 - cosine between the mean gradient of all batches and the true one. A part of it is noise
  that the mean over the batches has left.
* noise: variance of the gradient of one batch, as a multiple of the squared length of the mean.
* error: 1 - the mean cosine between the gradient of one batch and the true one; both together.

The baseline is GRPO on flat samples. `gae` has a critic whose values are wrong by 0.05 (standard
deviation of a fixed error for each state), `remax` the greedy answer's expected reward.
`gigpo` and `hgpo` see equal answers wherever the tool has only one, as in all games but `luck`.
`appo_released` reads how the engine's log-probs differ from the trainer's, here by independent
errors of standard deviation 0.02. `egpo` takes the entropy of the whole response, since a turn is
one token.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mega_agentrl.config.algorithm_traits import ESTIMATORS
from mega_agentrl.config.enums import CotBlocks
from mega_agentrl.config.sections.algo import AlgoConfig, EgpoConfig
from mega_agentrl.train.advantages import add_advantages
from mega_agentrl.types.batch import TrainBatch
from tools.credit.games import Game, all_games
from tools.measurement import bench_line, parse_options, select_cases

NUM_GROUPS = 16
BASELINE = ("grpo", "flat")
METRICS = ("bias", "noise", "error")
VARIANTS = {
    "dr_grpo": AlgoConfig(advantage="grpo", advantage_options={"norm_by_std": False}),
    "egpo": AlgoConfig(advantage="grpo", egpo=EgpoConfig(lam=0.4, cot_blocks=CotBlocks.response)),
    "aepo": AlgoConfig(advantage="grpo", entropy_advantage_weight=0.2),
    "at2po_exact": AlgoConfig(advantage="at2po", advantage_options={"exact_entropy": True}),
    "fork_credit_stein": AlgoConfig(advantage="fork_credit", advantage_options={"shrinkage": None}),
    "appo_dual_group": AlgoConfig(advantage="appo_released", advantage_options={"weight": 0.0}),
}
"""Settings under names of their own, beside the registered estimators with default options."""
CRITIC_ERROR = 0.1
ENGINE_ERROR = 0.02


@dataclass
class Trajectory:
    """One trajectory: what was done in each turn."""

    states: list[int]
    actions: list[int]
    tokens: list[int]
    """Tree-token id of each turn's action."""
    reward: float = 0.0


@dataclass
class Group:
    """The trajectories of a prompt."""

    level: float
    """Probability of a reward beside what the actions add."""
    trajectories: list[Trajectory]


class Sampler:
    """Samples batches of a game."""

    def __init__(self, game: Game, num_turns: int, seed: int) -> None:
        self._game = game
        self._num_turns = num_turns
        self._random = np.random.default_rng(seed)
        self._num_tokens = 0

    def sample(self, way: str) -> list[Group]:
        """Return the trajectories of each group, sampled `flat` or `forked`."""
        return [self._sample_group(way) for _ in range(NUM_GROUPS)]

    def _sample_group(self, way: str) -> Group:
        level = 0.5 * self._random.random()
        depth = self._game.num_turns
        num_left = self._num_turns
        paths: list[Trajectory] = []
        while num_left >= depth and (way == "flat" or num_left > self._num_turns // 2):
            paths.append(self._continue(None, 0, level))
            num_left -= depth
        while way == "forked" and num_left and depth > 1:
            turn = depth - int(self._random.integers(1, min(depth - 1, num_left) + 1))
            parent = paths[self._random.integers(len(paths))]
            paths.append(self._continue(parent, turn, level))
            num_left -= depth - turn
        return Group(level, paths)

    def _continue(self, parent: Trajectory | None, turn: int, level: float) -> Trajectory:
        """Return a new path that shares the turns before `turn` with the parent."""
        game = self._game
        path = Trajectory([0], [], [])
        if parent is not None:
            path = Trajectory(
                parent.states[: turn + 1], parent.actions[:turn], parent.tokens[:turn]
            )
        for now in range(turn, game.num_turns):
            state = path.states[-1]
            action = self._choose(game.policy_DSA[now][state])
            answer_SAO = game.answer_DSAO[now]
            answer = self._choose(answer_SAO[state, action])
            path.states.append(
                (state * answer_SAO.shape[1] + action) * answer_SAO.shape[2] + answer
            )
            path.actions.append(action)
            path.tokens.append(self._num_tokens)
            self._num_tokens += 1
        reward = level + 0.5 * game.reward_S[path.states[-1]]
        path.reward = float(self._random.random() < reward)
        return path

    def _choose(self, probability: np.ndarray) -> int:
        cumulative = probability.cumsum()
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1]))


def make_batch(
    game: Game, groups: list[Group], critic_DS: list[np.ndarray], random: np.random.Generator
) -> TrainBatch:
    """Return the training batch of the trajectories: an action and an answer for each turn."""
    rows = [
        (number, group.level, path)
        for number, group in enumerate(groups)
        for path in group.trajectories
    ]
    shape = (len(rows), 2 * game.num_turns)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    mask_BT[:, ::2] = True
    token_BT = torch.zeros(shape, dtype=torch.int64)
    token_BT[:, ::2] = torch.tensor([path.tokens for _, _, path in rows])
    response_BT = torch.zeros(shape, dtype=torch.int64)
    response_BT[:, ::2] = torch.tensor([path.actions for _, _, path in rows])
    num_answers = [answer_SAO.shape[2] for answer_SAO in game.answer_DSAO]
    response_BT[:, 1::2] = torch.tensor(
        [
            [state % number for state, number in zip(path.states[1:], num_answers, strict=True)]
            for _, _, path in rows
        ]
    )
    value_BT = torch.zeros(shape)
    value_BT[:, ::2] = torch.tensor(
        [
            [
                level + 0.5 * float(critic_DS[turn][state])
                for turn, state in enumerate(path.states[:-1])
            ]
            for _, level, path in rows
        ]
    )
    logp_BT, entropy_BT = torch.zeros(shape), torch.zeros(shape)
    for turn, policy_SA in enumerate(game.policy_DSA):
        policy_BA = policy_SA[[path.states[turn] for _, _, path in rows]]
        action_B = [path.actions[turn] for _, _, path in rows]
        logp_BT[:, 2 * turn] = torch.tensor(np.log(policy_BA[range(len(rows)), action_B]))
        entropy_BT[:, 2 * turn] = torch.tensor(-(policy_BA * np.log(policy_BA)).sum(1))
    noise_BT = torch.tensor(random.standard_normal(shape), dtype=torch.float32)
    return TrainBatch(
        prompt_ids=((0,),) * len(rows),
        response_BT=response_BT,
        length_B=torch.full((len(rows),), shape[1]),
        mask_BT=mask_BT,
        group_B=torch.tensor([number for number, _, _ in rows]),
        reward_B=torch.tensor([path.reward for _, _, path in rows]),
        tree_token_BT=token_BT,
        rollout_logp_BT=logp_BT,
        rollout_entropy_BT=entropy_BT,
        entropy_BT=entropy_BT,
        old_logp_BT=logp_BT + ENGINE_ERROR * noise_BT,
        version_BT=torch.zeros(shape, dtype=torch.int64),
        value_BT=value_BT,
        baseline_B=torch.tensor([level + 0.5 * game.greedy_value() for _, level, _ in rows]),
    )


def estimate_gradient(game: Game, groups: list[Group], advantage_BT: torch.Tensor) -> np.ndarray:
    """Return the sum of advantage times score function over all rows, flat like the true one."""
    paths = [path for group in groups for path in group.trajectories]
    advantage_BD = advantage_BT[:, ::2].double().numpy()
    parts = []
    for turn, policy_SA in enumerate(game.policy_DSA):
        states = [path.states[turn] for path in paths]
        actions = [path.actions[turn] for path in paths]
        gradient_SA = np.zeros(policy_SA.shape)
        np.add.at(gradient_SA, (states, actions), advantage_BD[:, turn])
        np.add.at(gradient_SA, states, -advantage_BD[:, turn, None] * policy_SA[states])
        parts.append(gradient_SA.ravel())
    return np.concatenate(parts)


def measure(
    game: Game, algo: AlgoConfig, way: str, args: argparse.Namespace
) -> dict[str, float | None]:
    """Return bias, noise and error of an estimator in a game."""
    sampler = Sampler(game, args.turns, args.seed)
    random = np.random.default_rng(args.seed + 1)
    critic_DS = [
        value_S + CRITIC_ERROR * random.standard_normal(value_S.shape) for value_S in game.value_DS
    ]
    gradients = []
    for _ in range(args.batches):
        groups = sampler.sample(way)
        batch = make_batch(game, groups, critic_DS, random)
        filled, _ = add_advantages(batch, algo, kl_coef=0.0, cot_marker_ids=None)
        assert filled.advantage_BT is not None
        gradients.append(estimate_gradient(game, groups, filled.advantage_BT))
    gradient_RG = np.stack(gradients)
    mean_G = gradient_RG.mean(0)
    variance = float(((gradient_RG - mean_G) ** 2).sum() / (len(gradient_RG) - 1))
    # The squared length of the mean is too long by what is left of the noise.
    length = float((mean_G**2).sum()) - variance / len(gradient_RG)
    return {
        "bias": 1 - _cosine(mean_G, game.gradient),
        "noise": variance / length if length > 0 else None,
        "error": 1 - float(np.mean([_cosine(one_G, game.gradient) for one_G in gradient_RG])),
    }


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    length = np.linalg.norm(first) * np.linalg.norm(second)
    return float(first @ second / length) if length else 0.0


def algorithms() -> dict[str, AlgoConfig]:
    """Return the settings of every estimator by the name of its cases."""
    return {name: AlgoConfig(advantage=name) for name in ESTIMATORS.registered()} | VARIANTS


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of GAME/ESTIMATOR/WAY")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--turns", type=int, default=32, help="sampled turns of a group")
    parser.add_argument("--seed", type=int, default=0)
    return parse_options(parser, None, cases=["sum/*"], batches=8)


def main() -> None:
    """Measure all cases and print a line for each."""
    args = parse_args()
    torch.set_num_threads(1)
    games = {game.name: game for game in all_games()}
    algos = algorithms()
    cases = [
        f"{game}/{estimator}/{way}"
        for game in games
        for estimator in algos
        for way in ("flat", "forked")
    ]
    baselines: dict[str, dict[str, float | None]] = {}
    for case in select_cases(args.cases, cases):
        game, estimator, way = case.split("/")
        if game not in baselines:
            baselines[game] = measure(games[game], algos[BASELINE[0]], BASELINE[1], args)
        found = measure(games[game], algos[estimator], way, args)
        for name in METRICS:
            print(
                json.dumps(
                    bench_line("credit", f"{case}/{name}", name, found[name], baselines[game][name])
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
