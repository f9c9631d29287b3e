"""`train.seen_file`: what was seen comes back; cut, foreign and damaged files."""

import json

import pytest
import torch

from mega_agentrl.train.seen import observe
from mega_agentrl.train.seen_file import SeenFile
from tests.train.hesitant_trees import path, steady, tree

SETTINGS = {"seed": 1, "rollout.temperature": 1.0, "reward.rubric": {"default": {"arpo": 1.0}}}


def chunk(number):
    trees = [
        tree(f"p{number}", path(1, [0.1 * number] * 7), path(0, []), path(0, steady(3))),
        tree(f"q{number}", path(1, steady(number), [1 / 3] * 9)),
    ]
    return observe(trees, None)


def same(one, other):
    assert one.ids == other.ids and one.prompt_ids == other.prompt_ids
    assert torch.equal(one.correct_B, other.correct_B)
    assert torch.equal(one.entropy_B, other.entropy_B)
    assert torch.equal(one.p95_B.nan_to_num(-1), other.p95_B.nan_to_num(-1))
    for threshold in (-1.0, 0.2, float(torch.tensor(1 / 3)), 3.0):
        assert torch.equal(one.hwe_B(threshold), other.hwe_B(threshold))


def test_what_is_read_is_what_was_seen(tmp_path):
    file = SeenFile(tmp_path / "run" / "seen.jsonl", SETTINGS, 2)
    nothing = observe([tree("r", path(None, [1.0]))], None)
    for seen in (chunk(1), nothing):
        file.append(seen)
    again = SeenFile(tmp_path / "run" / "seen.jsonl", SETTINGS, 2)
    assert again.num_done == 2 and again.result is None
    for stored, seen in zip(again.chunks(), (chunk(1), nothing), strict=True):
        same(stored, seen)


def test_the_result_takes_the_place_of_the_chunks(tmp_path):
    path = tmp_path / "seen.jsonl"
    file = SeenFile(path, SETTINGS, 1)
    file.append(chunk(0))
    file.finish({"ares": {"threshold": 0.1 + 0.2}})
    assert SeenFile(path, SETTINGS, 1).result == {"ares": {"threshold": 0.1 + 0.2}}
    assert len(path.read_text().splitlines()) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_cut_anywhere_is_written_again(tmp_path):
    path = tmp_path / "seen.jsonl"
    file = SeenFile(path, SETTINGS, 3)
    file.append(chunk(0))
    whole = path.read_bytes()
    file.append(chunk(1))
    both = path.read_bytes()
    for size in (len(whole), len(whole) + 1, len(both) - 1):
        path.write_bytes(both[:size])
        again = SeenFile(path, SETTINGS, 3)
        assert again.num_done == 1 and path.read_bytes() == whole
        again.append(chunk(1))
        assert path.read_bytes() == both


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "seen.jsonl"
    SeenFile(path, SETTINGS, 2)
    with pytest.raises(ValueError, match=r"made with rollout.temperature=1.0, not 0.7; expected"):
        SeenFile(path, SETTINGS | {"rollout.temperature": 0.7}, 2)
    with pytest.raises(ValueError, match="num_chunks=2, not 3"):
        SeenFile(path, SETTINGS, 3)
    path.write_text("")
    with pytest.raises(ValueError, match="format=None, not 1"):
        SeenFile(path, SETTINGS, 2)


def test_damage_is_named(tmp_path):
    path = tmp_path / "seen.jsonl"
    SeenFile(path, SETTINGS, 2).append(chunk(0))
    head, line = path.read_text().splitlines(keepends=True)
    path.write_text(head + "hello\n" + line)
    with pytest.raises(ValueError, match=r"seen.jsonl:2: got a line that is no JSON"):
        SeenFile(path, SETTINGS, 2)
    path.write_text(head + json.dumps(json.loads(line) | {"chunk": 1}) + "\n")
    with pytest.raises(ValueError, match="got chunk 1 behind 0 others"):
        SeenFile(path, SETTINGS, 2)
