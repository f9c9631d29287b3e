"""Yaml files become interactions, or an error that names file and entry."""

from __future__ import annotations

import pytest

from mega_agentrl.rollout.interaction.base import Interaction, Reply, load_interactions
from tests.config.refusals import refused

USERS = """
from mega_agentrl.rollout.interaction.base import Interaction, Reply

class Echo(Interaction):
    name = "echo"

    def __init__(self, word="again"):
        self.word = word

    async def respond(self, state, messages):
        return Reply(text=self.word)

class Silent(Interaction):
    name = "silent"

class Nameless(Echo):
    name = None

class Picky(Echo):
    def __init__(self, word):
        raise RuntimeError("no such word")

other = 3
"""


def _write(tmp_path, text):
    (tmp_path / "users.py").write_text(USERS)
    path = tmp_path / "users.yaml"
    path.write_text(text)
    return path


def test_entries_become_interactions_with_their_settings(tmp_path):
    path = _write(
        tmp_path,
        """
        - class_name: users.py:Echo
        - {name: other, class_name: users.py:Echo, config: {word: no}, timeout_s: 2, max_turns: 7}
        - class_name: mega_agentrl.rollout.interaction.gsm8k.Gsm8kInteraction
        """,
    )
    first, second, third = load_interactions(path)
    assert (first.name, first.word, first.timeout_s, first.max_turns) == ("echo", "again", 60, 4)
    assert (second.name, second.timeout_s, second.max_turns) == ("other", 2, 7)
    assert second.word is False, "yaml's own reading of no"
    assert third.name == "gsm8k_user"


def test_a_file_with_a_head_is_read_too(tmp_path):
    path = _write(tmp_path, "interaction:\n  - class_name: users.py:Echo\n")
    assert [one.name for one in load_interactions(path)] == ["echo"]


KEY = "rollout.interaction_config_file"


@pytest.mark.parametrize(
    ("text", "where", "fact"),
    [
        ("", "", "NoneType"),
        ("a: 1", "", "dict"),
        ("- [", "", "not valid"),
        ("- x", ", entry 1", "'x'"),
        ("- {class_name: users.py:Echo, turns: 3}", ", entry 1, keys", "turns"),
        ("- class_name: users.py:None", ", entry 1, class_name", "None"),
        ("- class_name: users.py:other", ", entry 1, class_name", "got 3"),
        ("- class_name: nothing.at.All", ", entry 1, class_name", "'nothing'"),
        ("- class_name: users.py:Silent", ", entry 1, class_name", "['respond']"),
        ("- class_name: users.py:Nameless", ", entry 1, name", "None"),
        ("- {class_name: users.py:Echo, config: 3}", ", entry 1, config", "mapping"),
        ("- {class_name: users.py:Echo, config: {x: 3}}", ", entry 1, config", "TypeError"),
        ("- {class_name: users.py:Picky, config: {word: a}}", ", entry 1, config", "no such word"),
        ("- {class_name: users.py:Echo, timeout_s: 0}", ", entry 1, timeout_s", "=0"),
        ("- {class_name: users.py:Echo, max_turns: 1.5}", ", entry 1, max_turns", "whole"),
        ("- class_name: users.py:Echo\n- class_name: users.py:Echo", ", names", "['echo', 'echo']"),
    ],
)
def test_errors_name_file_and_entry(tmp_path, text, where, fact):
    path = _write(tmp_path, text)
    error = refused(load_interactions, path)
    assert error.key == (f"{KEY}={path}{where}" if where else KEY)
    assert fact in str(error).removeprefix(error.key)


def test_a_missing_file_is_refused(tmp_path):
    assert refused(load_interactions, tmp_path / "none.yaml").got == tmp_path / "none.yaml"


async def test_a_state_without_fork_is_not_shared():
    class Stateful(Interaction):
        name = "s"

        async def respond(self, state, messages):
            return Reply()

    class Forking(Stateful):
        async def fork(self, state):
            return list(state)

    assert Stateful().can_fork(None) and not Stateful().can_fork([])
    assert Forking().can_fork([])
    with pytest.raises(TypeError):
        await Stateful().fork([])
    stateless = Stateful()
    assert await stateless.create({}) is None and await stateless.calc_reward(None) is None
    await stateless.release(None)
    stateless.check_kwargs({})
