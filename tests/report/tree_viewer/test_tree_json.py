"""The JSON of a tree: every token once and in its place, lanes of paths, texts of tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.errors import InputError
from mega_agentrl.report.page.html import json_for_script
from mega_agentrl.report.tree_viewer.tree_json import (
    MAX_TEXT_CHARS,
    TokenTexts,
    assign_lanes,
    parent_indices,
    sampled_entropies,
    tree_to_json,
    turns_after_fork,
)
from mega_agentrl.types.records import ContextReset, ToolStatus
from tests.fakes import FakeGenerator, FakeTools, turns
from tests.rollout.grown_trees import CALL, END, grow, grown, nested_tree, parted


def characters(token_ids):
    return [chr(token) for token in token_ids]


def test_a_nested_tree_has_its_paths_turns_and_values():
    view = tree_to_json(nested_tree(), characters, {"set_0/0/0.0": -0.5})
    assert (view["id"], view["truth"], view["forks"], view["extraRoots"]) == ("set/0", "1", 3, 0)
    assert view["question"] == [{"role": "user", "text": "Q"}]
    assert view["size"] == max(path["end"] for path in view["paths"])
    root, first, nested, second = view["paths"]
    assert [path["name"] for path in view["paths"]] == ["0", "0.0", "0.0.0", "0.1"]
    assert [path["parent"] for path in view["paths"]] == [None, 0, 1, 0]
    assert [path["lane"] for path in view["paths"]] == [0, 2, 3, 1]
    assert [path["fork"] for path in view["paths"]] == [0, 50, 101, 101]
    assert [path["advantage"] for path in view["paths"]] == [None, -0.5, None, None]
    call, answer = root["turns"][:2]
    assert (call["by"], call["from"], call["to"]) == ("assistant", 0, 28)
    assert "".join(call["pieces"]) == "thinkhard<search>q1</search>"
    assert (call["h"], call["v"], call["sampled"]) == (1.0, 1, 1)
    assert (answer["by"], answer["from"], answer["to"]) == ("tool", 28, 50)
    assert answer["call"]["tool"] == "search" and answer["call"]["status"] == "ok"
    assert "answer" not in answer["call"]
    assert first["turns"][0]["from"] == 50 and nested["turns"][0]["from"] == 101
    assert second["turns"][0]["from"] == 101


def test_decisions_name_the_forks_they_made():
    root = tree_to_json(nested_tree())["paths"][0]
    made = {decision["at"]: decision["made"] for decision in root["decisions"]}
    assert made == {50: ["0.0"], 101: ["0.1"]}
    decision = root["decisions"][0]
    assert (decision["h"], decision["baseline"], decision["dh"]) == (2.0, 1.0, 1.0)
    assert [decision[key] for key in ("n", "p", "tau", "slots")] == [8, 0.7, 0.5, 3]


def test_without_a_tokenizer_a_turn_has_token_ids_and_its_text():
    turn = tree_to_json(nested_tree())["paths"][0]["turns"][0]
    assert turn["text"] == "thinkhard<search>q1</search>"
    assert turn["ids"] == list(map(ord, turn["text"]))
    assert "pieces" not in turn


def test_a_failure_that_the_policy_does_not_see_is_shown():
    tools = FakeTools(status=lambda text: ToolStatus.infra_error)
    engine = FakeGenerator(turns(CALL, END))
    (tree,) = grow(RolloutConfig(group_size=1), generator=engine, tools=tools)
    (path,) = tree_to_json(tree)["paths"]
    calls = [turn["call"] for turn in path["turns"] if "call" in turn]
    assert [call["status"] for call in calls] == ["infra_error"]
    assert path["failed"] and path["stop"] == "tool_failure" and path["reward"] is None


def test_a_message_without_text_is_empty_and_an_unknown_form_is_spelled_out():
    tree = nested_tree()
    parts = [{"type": "audio", "audio": "Q"}]
    messages = ({"role": "user", "content": None}, {"role": "user", "content": parts})
    view = tree_to_json(replace(tree, prompt=replace(tree.prompt, messages=messages)))
    assert [one["text"] for one in view["question"]] == ["", str(parts)]


def test_optional_keys_are_present_only_with_a_value():
    tree = nested_tree()
    one = tree.trajectories[0]
    assert not {"drift", "restarts"} & tree_to_json(tree)["paths"][0].keys()
    one.template_drift, one.tool_rewards = "x" * (MAX_TEXT_CHARS + 7), {"python": 0.5}
    one.context_resets = (ContextReset(start=50, token_ids=(1,)),)
    path = tree_to_json(tree)["paths"][0]
    assert path["restarts"] == [50] and path["toolRewards"] == {"python": 0.5}
    assert path["drift"].endswith("x ... (7 more characters)")


@given(st.one_of(grown(), parted()))
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
def test_every_token_is_written_once_and_paths_are_whole(tree):
    view = tree_to_json(tree, characters)
    paths = view["paths"]
    for path, one in zip(paths, tree.trajectories, strict=True):
        covered = [(turn["from"], turn["to"]) for turn in path["turns"]]
        ends = [path["fork"], *(to for _, to in covered)]
        assert [start for start, _ in covered] == ends[:-1] and ends[-1] == path["end"]
        own = [turn for turn in path["turns"] if turn["by"] == "assistant"]
        assert all(len(turn["pieces"]) == turn["to"] - turn["from"] for turn in own)
        assert [max(turn.start, one.fork_len) for turn in turns_after_fork(one)] == [
            start for start, _ in covered
        ]
        made = [name for asked in path["decisions"] for name in asked["made"]]
        assert set(made) <= {other["name"] for other in paths}
    num_sampled = sum(sum(one.loss_mask[one.fork_len :]) for one in tree.trajectories)
    assert len(sampled_entropies(tree)) == num_sampled
    json.loads(json_for_script(view))


def test_of_two_forks_at_one_token_the_first_is_nearest():
    paths = nested_tree().trajectories
    paths[1].fork_len = paths[3].fork_len
    assert assign_lanes(paths) == [0, 1, 2, 3]


def test_a_missing_parent_is_refused():
    paths = nested_tree().trajectories
    with pytest.raises(InputError) as caught:
        assign_lanes(paths[1:])
    assert caught.value.got == paths[0].trajectory_id
    assert assign_lanes([]) == []


@given(grown(rounds=False))
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
def test_no_fork_line_crosses_a_lane(tree):
    paths = list(tree.trajectories)
    lanes, parents = assign_lanes(paths), parent_indices(paths)
    assert sorted(lanes) == list(range(len(paths)))
    for number, parent in enumerate(parents):
        if parent is None:
            continue
        assert lanes[parent] < lanes[number]
        for path, lane in zip(paths, lanes, strict=True):
            if lanes[parent] < lane < lanes[number]:
                assert path.fork_len >= paths[number].fork_len


def from_bytes(token_ids):
    """A decoder whose tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


def without_first_space(token_ids):
    """A decoder that drops the space in front of everything, as some do."""
    words = {1: "▁the", 2: "▁cat", 3: "s", 4: "▁"}
    return "".join(words[token] for token in token_ids).replace("▁", " ").removeprefix(" ")


def test_a_character_of_several_tokens_is_with_the_last():
    assert TokenTexts(from_bytes).split("aé漢!".encode()) == ["a", "", "é", "", "", "漢", "!"]


def test_half_a_character_at_the_end_is_shown_broken():
    assert TokenTexts(from_bytes).split("a漢".encode()[:-1]) == ["a", "", "\ufffd"]


def test_spaces_are_kept():
    pieces = TokenTexts(without_first_space)
    assert pieces.split([1, 2, 3, 1]) == ["the", " cat", "s", " the"]
    assert pieces.split([]) == []


def test_bytes_that_are_no_text_do_not_stall():
    pieces = TokenTexts(from_bytes).split([0xFF] * 20 + [65])
    assert len(pieces) == 21 and pieces[-1].endswith("A")


@given(st.text(max_size=30))
def test_the_pieces_are_the_text(words):
    token_ids = words.encode("utf-8", "ignore")
    pieces = TokenTexts(from_bytes).split(token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == from_bytes(token_ids)
