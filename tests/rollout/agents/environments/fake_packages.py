"""One game with faults, as an environment of Gymnasium, OpenEnv and verifiers.

The game has three steps. An action is a number up to 100; its reward is a hundredth of it.
Gymnasium is the real package; OpenEnv and verifiers, which the tests do not install, are modules
with the same interfaces.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import aiohttp
import gymnasium

NUM_STEPS = 3
MAX_NUMBER = 100


@dataclass
class Games:
    """The games of a test.

    faults: what fails, by the number of the game in the order in which they are made.
    """

    faults: dict[int, str] = field(default_factory=dict)
    made: list[Game] = field(default_factory=list)

    def make(self):
        self.made.append(Game(self.faults.get(len(self.made), "")))
        return self.made[-1]

    @property
    def only_hanging_left(self):
        """Whether a call hangs and all other games have ended."""
        return any(game.is_hanging for game in self.made) and all(
            game.is_hanging or game.is_closed for game in self.made
        )


@dataclass
class Game:
    fault: str
    seed: int | None = None
    numbers: list[int] = field(default_factory=list)
    is_closed: bool = False
    is_hanging: bool = False

    def reset(self, seed):
        self.seed = seed
        if self.fault == "reset":
            raise OSError("no such level")
        return f"Seed {seed}."

    def step(self, number):
        """Text, reward and whether the game is over."""
        self.numbers.append(number)
        if self.fault == "step" and len(self.numbers) == 2:
            raise KeyError("level 2")
        if self.fault == "end of data":
            raise StopIteration
        if self.fault == "exit":
            sys.exit("no licence")
        reward = float("nan") if self.fault == "nan" else number / MAX_NUMBER
        return f"Step {len(self.numbers)}.", reward, len(self.numbers) == NUM_STEPS

    def score(self):
        if self.fault == "scoring":
            raise ZeroDivisionError("no answers")

    def close(self):
        self.is_closed = True
        if self.fault == "close":
            raise OSError("closed already")


class GymEnvironment(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(MAX_NUMBER + 1)
    observation_space = gymnasium.spaces.Text(100)

    def __init__(self, game):
        self._game = game

    def reset(self, *, seed=None, options=None):
        return self._game.reset(seed), {}

    def step(self, number):
        if self._game.fault == "hang":
            self._game.is_hanging = True
            threading.Event().wait()
        text, reward, is_over = self._game.step(number)
        is_cut = is_over and self._game.fault == "truncated"
        return text, reward, is_over and not is_cut, is_cut, {}

    def close(self):
        self._game.close()


def register_gymnasium(games, monkeypatch):
    """Register the game as `Numbers-v0` of the real Gymnasium."""
    spec = gymnasium.envs.registration.EnvSpec(
        id="Numbers-v0",
        entry_point=lambda: GymEnvironment(games.make()),
        disable_env_checker=True,  # it raises errors of its own at some of the faults
    )
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)


class OpenEnvClient:
    """`GenericEnvClient`; a lost session is replaced without a word, as in openenv 0.10."""

    episode_ids = itertools.count()

    def __init__(self, game):
        self._game = game
        self._episode_id = next(self.episode_ids)

    async def connect(self):
        if self._game.fault == "refused":
            raise ConnectionError("refused")

    async def reset(self, **kwargs):
        return self._result(self._game.reset(kwargs["seed"]), None, False)

    async def step(self, action):
        if self._game.fault == "hang":
            self._game.is_hanging = True
            await asyncio.sleep(1000)
        if self._game.fault == "lost" and self._game.numbers:
            self._episode_id = next(self.episode_ids)
        number = int(action["message"].split()[-1].strip("."))
        return self._result(*self._game.step(number))

    async def state(self):
        return {"episode_id": self._episode_id}

    async def close(self):
        self._game.close()

    def _result(self, text, reward, is_over):
        observation = {"text": text, "done": is_over, "reward": reward}
        return SimpleNamespace(observation=observation, reward=reward, done=is_over)


def install_openenv(games, monkeypatch):
    def client(base_url, message_timeout_s):
        return OpenEnvClient(games.make())

    _install(monkeypatch, "openenv", "core", GenericEnvClient=client)


class VerifiersTaskset:
    bounded = True

    def __iter__(self):
        for index in range(3):
            yield SimpleNamespace(
                data=SimpleNamespace(
                    idx=index,
                    prompt_text=f"Question {index}",
                    system_prompt="Answer.",
                    description=None,
                    name=None,
                    answer=index,
                )
            )


class VerifiersEnvironment:
    """Asks the policy for each step; errors become part of the episode, as in verifiers 0.4."""

    def __init__(self, games):
        self.taskset = VerifiersTaskset()
        self._games = games

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        game = self._games.make()
        trace = SimpleNamespace(
            agent=SimpleNamespace(trainable=True),
            is_timeout=game.fault == "timeout",
            stop_condition="scoring_timeout",
            rewards={},
            errors=[],
        )
        episode = SimpleNamespace(ok=False, errors=[], traces=[trace])
        try:
            total = await self._play(game, task.data.idx, context.client.base_url)
            game.score()
        except Exception as error:  # noqa: BLE001
            name = "ProviderError" if isinstance(error, aiohttp.ClientError) else "TaskError"
            trace.errors.append(SimpleNamespace(type=name, message=str(error)))
            return episode
        episode.ok = True
        reward = SimpleNamespace(value=total)
        trace.rewards = {"play": None if game.fault == "unscored" else reward}
        trace.rewards["bonus"] = SimpleNamespace(value=1.0)
        return episode

    async def _play(self, game, index, url):
        messages = [{"role": "user", "content": game.reset(index)}]
        total, is_over = 0.0, False
        async with aiohttp.ClientSession(raise_for_status=True) as http:
            while not is_over:
                body = {"model": "policy", "messages": messages}
                async with http.post(f"{url}/chat/completions", json=body) as response:
                    choice = (await response.json())["choices"][0]
                if choice["finish_reason"] == "length":
                    return total
                message = choice["message"]
                number = int(message["content"].split()[-1].strip("."))
                text, reward, is_over = game.step(number)
                total += reward
                messages += [message, {"role": "user", "content": text}]
        return total


def install_verifiers(games, monkeypatch):
    _install(
        monkeypatch,
        "verifiers",
        "v1",
        resolve_env_config=lambda block: SimpleNamespace(env_id="numbers"),
        load_environment=lambda config: VerifiersEnvironment(games),
        EvalClientConfig=SimpleNamespace,
        ModelContext=SimpleNamespace,
    )


def _install(monkeypatch, package, module, **content):
    """Let `package.module` be importable with this content."""
    inner, outer = ModuleType(f"{package}.{module}"), ModuleType(package)
    vars(inner).update(content)
    setattr(outer, module, inner)
    for loaded in (outer, inner):
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
