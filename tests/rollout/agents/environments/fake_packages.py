"""One game with faults, as an environment of Gymnasium, OpenEnv and verifiers.

The game has three steps. An action is a number up to 100; its reward is a hundredth of it.
Gymnasium is the real package. OpenEnv is a server that speaks its protocol, and verifiers, which
the tests do not install, a module with the same interface; `tests/packages` has the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import aiohttp
import gymnasium
from aiohttp import WSMsgType, web

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
    episode_id: str = ""
    """What an OpenEnv server calls it."""

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


class OpenEnvServer:
    """The WebSocket protocol of `openenv-core` 0.3: each connection is a game.

    Attributes:
        is_alive: Set when a client has answered a ping.
    """

    def __init__(self):
        self.games = Games()
        self.is_alive = asyncio.Event()
        self._episode_ids = itertools.count()

    async def serve_session(self, request):
        game = self.games.make()
        if game.fault == "refused":
            return web.Response(status=503)
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        try:
            if game.fault == "full":
                await self._send_error(socket, "CAPACITY_REACHED", "4 of 4 sessions")
                return socket
            if game.fault == "pings":
                await socket.ping()
            game.episode_id = str(next(self._episode_ids))
            async for message in socket:
                if message.type is WSMsgType.PONG:
                    self.is_alive.set()
                    continue
                if not await self._answer(socket, game, message.json()):
                    break
        finally:
            with contextlib.suppress(OSError):
                game.close()
        return socket

    async def _answer(self, socket, game, message):
        """Answer a message; return whether the session goes on."""
        kind, data = message["type"], message.get("data")
        try:
            if kind == "close":
                return False
            if kind == "state":
                await self._send(socket, "state", {"episode_id": game.episode_id})
            elif kind == "reset":
                await self._send_observation(socket, game.reset(data["seed"]), None, False)
            elif errors := self._errors(data):
                await self._send_error(socket, "VALIDATION_ERROR", "Invalid message", errors)
            elif game.fault == "dropped" and game.numbers:
                return False
            elif game.fault == "garbled":
                await socket.send_str('{"type": "observation"}')
            else:
                await self._step(socket, game, int(data["message"].split()[-1].strip(".")))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            await self._send_error(socket, "EXECUTION_ERROR", str(error))
        return True

    async def _step(self, socket, game, number):
        if game.fault == "hang":
            game.is_hanging = True
            await asyncio.sleep(1000)
        if game.fault == "lost" and game.numbers:
            game.episode_id = str(next(self._episode_ids))
        if game.fault == "invalid observation":
            errors = [{"type": "missing", "loc": ["text"], "msg": "Field required", "input": {}}]
            await self._send_error(socket, "VALIDATION_ERROR", "Invalid message", errors)
            return
        await self._send_observation(socket, *game.step(number))

    def _errors(self, action):
        """What pydantic finds in an action whose only field has a digit."""
        if set(action) != {"message"}:
            return [{"type": "missing", "loc": ["message"], "msg": "Required", "input": action}]
        if not any(map(str.isdigit, action["message"])):
            text = action["message"]
            return [{"type": "int_parsing", "loc": ["message"], "msg": "No digit", "input": text}]
        return []

    async def _send_observation(self, socket, text, reward, is_over):
        data = {"observation": {"text": text}, "reward": reward, "done": is_over}
        await self._send(socket, "observation", data)

    async def _send_error(self, socket, code, text, errors=None):
        errors = {} if errors is None else {"errors": errors}
        await self._send(socket, "error", {"code": code, "message": text} | errors)

    async def _send(self, socket, kind, data):
        await socket.send_json({"type": kind, "data": data})


@asynccontextmanager
async def serve_openenv():
    """A server and its address."""
    server, app = OpenEnvServer(), web.Application()
    app.router.add_get("/ws", server.serve_session)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


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
