"""The line of a case, whose ratio is more where ours is better, and the peak memory."""

import pytest

from tools.measurement import PeakMemory, bench_line


def test_keys_and_ratio():
    line = bench_line("b", "a/case", "s", 0.25, 1.0)
    assert list(line) == ["bench", "case", "unit", "ours", "baseline", "ratio"]
    assert (line["ours"], line["baseline"], line["ratio"]) == (0.25, 1.0, 4.0)


def test_where_there_is_nothing_to_divide_there_is_no_ratio():
    for ours, baseline in ((None, 1.0), (1.0, None), (None, None), (0.0, 1.0)):
        line = bench_line("b", "c", "s", ours, baseline)
        assert (line["ours"], line["baseline"], line["ratio"]) == (ours, baseline, None)
    assert bench_line("b", "c", "s", 2.0, 0.0)["ratio"] == 0.0


def test_the_peak_is_what_was_taken_since_the_construction():
    block = bytearray(b"x") * (64 << 20)
    del block
    memory = PeakMemory()
    assert memory.peak_mib() < 16
    block = bytearray(b"x") * (64 << 20)
    del block
    assert 60 < memory.peak_mib() < 90
    assert memory.private_peak_mib() == pytest.approx(memory.peak_mib(), abs=1)
