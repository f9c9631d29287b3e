"""A game of TextArena; `--solve SEED` prints three turns that win it."""

import json
import sys

import textarena as ta
from gateway import ask


def game_of(seed: int):
    """A new game and its number."""
    game = ta.make("GuessTheNumber-v0")
    game.reset(num_players=1, seed=seed)
    inner = game
    while hasattr(inner, "env"):
        inner = inner.env
    return game, inner.game_number


def play(game, messages):
    """Play to the end and return the reward."""
    is_over = False
    while not is_over:
        _, observation = game.get_observation()
        messages.append({"role": "user", "content": str(observation)})
        is_over, _ = game.step(ask(messages))
    rewards, _ = game.close()
    return float(rewards[0])


if sys.argv[1:2] == ["--solve"]:
    number = game_of(int(sys.argv[2]))[1]
    wrong = [guess for guess in range(1, 21) if guess != number][:2]
    print(json.dumps([f"[{guess}]" for guess in (*wrong, number)]))
else:
    print(play(game_of(json.load(sys.stdin)["environment_kwargs"]["seed"])[0], []))
