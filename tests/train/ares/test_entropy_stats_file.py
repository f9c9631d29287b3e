"""`train.ares.entropy_stats_file`: chunks are read back; cut, foreign and damaged files."""

import json

import pytest
import torch

from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.entropy_stats_file import EntropyStatsFile
from tests.train.entropy_trees import path, steady, tree

SETTINGS = {"seed": 1, "rollout.temperature": 1.0, "reward.rubric": {"default": {"arpo": 1.0}}}


def chunk(number):
    trees = [
        tree(f"p{number}", path(1, [0.1 * number] * 7), path(0, []), path(0, steady(3))),
        tree(f"q{number}", path(1, steady(number), [1 / 3] * 9)),
    ]
    return collect_entropy_stats(trees, None)


def same(one, other):
    assert one.trajectory_ids == other.trajectory_ids and one.prompt_ids == other.prompt_ids
    assert torch.equal(one.is_correct_B, other.is_correct_B)
    assert torch.equal(one.mean_entropy_B, other.mean_entropy_B)
    assert torch.equal(one.entropy_p95_B.nan_to_num(-1), other.entropy_p95_B.nan_to_num(-1))
    for threshold in (-1.0, 0.2, float(torch.tensor(1 / 3)), 3.0):
        assert torch.equal(one.hwe_count_B(threshold), other.hwe_count_B(threshold))


def test_statistics_are_read_back_as_written(tmp_path):
    file = EntropyStatsFile(tmp_path / "run" / "seen.jsonl", SETTINGS, 2)
    nothing = collect_entropy_stats([tree("r", path(None, [1.0]))], None)
    for entropy_stats in (chunk(1), nothing):
        file.append(entropy_stats)
    again = EntropyStatsFile(tmp_path / "run" / "seen.jsonl", SETTINGS, 2)
    assert again.num_chunks_done == 2 and again.result is None
    for stored, entropy_stats in zip(again.read_chunks(), (chunk(1), nothing), strict=True):
        same(stored, entropy_stats)


def test_the_result_takes_the_place_of_the_chunks(tmp_path):
    path = tmp_path / "seen.jsonl"
    file = EntropyStatsFile(path, SETTINGS, 1)
    file.append(chunk(0))
    file.finish({"ares": {"threshold": 0.1 + 0.2}})
    assert EntropyStatsFile(path, SETTINGS, 1).result == {"ares": {"threshold": 0.1 + 0.2}}
    assert len(path.read_text().splitlines()) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_cut_anywhere_is_written_again(tmp_path):
    path = tmp_path / "seen.jsonl"
    file = EntropyStatsFile(path, SETTINGS, 3)
    file.append(chunk(0))
    whole = path.read_bytes()
    file.append(chunk(1))
    both = path.read_bytes()
    for size in (len(whole), len(whole) + 1, len(both) - 1):
        path.write_bytes(both[:size])
        again = EntropyStatsFile(path, SETTINGS, 3)
        assert again.num_chunks_done == 1 and path.read_bytes() == whole
        again.append(chunk(1))
        assert path.read_bytes() == both


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "seen.jsonl"
    EntropyStatsFile(path, SETTINGS, 2)
    with pytest.raises(ValueError, match=r"made with rollout.temperature=1.0, not 0.7; expected"):
        EntropyStatsFile(path, SETTINGS | {"rollout.temperature": 0.7}, 2)
    with pytest.raises(ValueError, match="num_chunks=2, not 3"):
        EntropyStatsFile(path, SETTINGS, 3)
    path.write_text("")
    with pytest.raises(ValueError, match="format=None, not 2"):
        EntropyStatsFile(path, SETTINGS, 2)


def test_damage_is_named(tmp_path):
    path = tmp_path / "seen.jsonl"
    EntropyStatsFile(path, SETTINGS, 2).append(chunk(0))
    head, line = path.read_text().splitlines(keepends=True)
    path.write_text(head + "hello\n" + line)
    with pytest.raises(ValueError, match=r"seen.jsonl:2: got a line that is no JSON"):
        EntropyStatsFile(path, SETTINGS, 2)
    path.write_text(head + json.dumps(json.loads(line) | {"chunk": 1}) + "\n")
    with pytest.raises(ValueError, match="got chunk 1 after 0 others"):
        EntropyStatsFile(path, SETTINGS, 2)
