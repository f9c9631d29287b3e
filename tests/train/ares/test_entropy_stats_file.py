"""`train.ares.entropy_stats_file`: chunks are read back; cut, damaged and other runs' files."""

import pytest
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.entropy_stats_file import EntropyStatsFile
from mega_agentrl.types.journal import Journal
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
    place = tmp_path / "run" / "seen.bin"
    file = EntropyStatsFile(place, SETTINGS, 2)
    nothing = collect_entropy_stats([tree("r", path(None, [1.0]))], None)
    for entropy_stats in (chunk(1), nothing):
        file.append(entropy_stats)
    again = EntropyStatsFile(place, SETTINGS, 2)
    assert again.num_chunks_done == 2 and again.result is None
    for stored, entropy_stats in zip(again.read_chunks(), (chunk(1), nothing), strict=True):
        same(stored, entropy_stats)


def test_the_result_takes_the_place_of_the_chunks(tmp_path):
    path = tmp_path / "seen.bin"
    file = EntropyStatsFile(path, SETTINGS, 1)
    file.append(chunk(0))
    file.finish({"ares": {"threshold": 0.1 + 0.2}})
    assert EntropyStatsFile(path, SETTINGS, 1).result == {"ares": {"threshold": 0.1 + 0.2}}
    assert len(list(Journal(path).recover(bytes))) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_chunk_cut_anywhere_is_written_again(tmp_path):
    path = tmp_path / "seen.bin"
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
    path = tmp_path / "seen.bin"
    EntropyStatsFile(path, SETTINGS, 2)

    def differences(settings, num_chunks):
        with pytest.raises(InputError) as caught:
            EntropyStatsFile(path, settings, num_chunks)
        assert caught.value.name == f"{path}: settings"
        return caught.value.got

    other = SETTINGS | {"rollout.temperature": 0.7}
    assert differences(other, 2) == "rollout.temperature=1.0, not 0.7"
    assert differences(SETTINGS, 3) == "num_chunks=2, not 3"
    before = path.read_bytes()
    Journal(path).rewrite([b"{}"])
    assert differences(SETTINGS, 2).startswith("format=None, not 3")
    path.write_bytes(before[:-1])
    assert EntropyStatsFile(path, SETTINGS, 2).num_chunks_done == 0
    assert path.read_bytes() == before, "without a whole header it is a new file"


def test_chunks_from_a_damaged_one_on_are_made_again(tmp_path):
    path = tmp_path / "seen.bin"
    file = EntropyStatsFile(path, SETTINGS, 3)
    for number in range(3):
        file.append(chunk(number))
    data = bytearray(path.read_bytes())
    second = [offset for offset, _ in Journal(path).recover(bytes)][2]
    data[second + 40] ^= 1
    path.write_bytes(data)
    again = EntropyStatsFile(path, SETTINGS, 3)
    assert again.num_chunks_done == 1
    same(next(again.read_chunks()), chunk(0))


@pytest.mark.parametrize(
    "body",
    [b"no JSON", b"\xff", b"[1]", b'{"chunk": "x"}', b'{"result": 3}', b"[" * 90 + b"]" * 90],
    ids=["text", "no UTF-8", "a list", "fields", "result", "depth"],
)
def test_a_record_that_no_pass_has_written_ends_the_file(tmp_path, body, caplog):
    path = tmp_path / "seen.bin"
    file = EntropyStatsFile(path, SETTINGS, 3)
    file.append(chunk(0))
    whole = path.read_bytes()
    Journal(path).append(body)
    file.append(chunk(1))
    again = EntropyStatsFile(path, SETTINGS, 3)
    assert again.num_chunks_done == 1 and again.result is None
    assert path.read_bytes() == whole
    assert len(caplog.records) == 1


def test_chunks_of_two_writers_are_refused(tmp_path):
    path = tmp_path / "seen.bin"
    one, two = (EntropyStatsFile(path, SETTINGS, 2) for _ in range(2))
    one.append(chunk(0))
    two.append(chunk(0))
    with pytest.raises(InputError) as caught:
        EntropyStatsFile(path, SETTINGS, 2)
    assert (caught.value.name, caught.value.got) == (f"{path}: number of a chunk", 0)
