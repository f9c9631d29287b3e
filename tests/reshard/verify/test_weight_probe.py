"""The probe is the same everywhere and scores every token but the first."""

from __future__ import annotations

from mega_agentrl.reshard.verify.weight_probe import probe_batch, probe_prompt


def test_the_prompt_is_fixed_and_inside_the_vocabulary():
    assert probe_prompt(50, 20) == probe_prompt(50, 20)
    assert probe_prompt(50, 20)[:10] == probe_prompt(50, 10)
    assert set(probe_prompt(7, 200)) == set(range(7))


def test_every_row_holds_the_prompt():
    batch = probe_batch([3, 1, 4, 1], 2)
    assert batch.prompt_ids == ((3,), (3,))
    assert batch.response_BT.tolist() == [[1, 4, 1]] * 2
    assert batch.length_B.tolist() == [3, 3]
