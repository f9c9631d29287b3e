"""The line of a case: its keys, and a ratio that is more where ours is better."""

from tools.bench_line import bench_line


def test_keys_and_ratio():
    line = bench_line("b", "a/case", "s", 0.25, 1.0)
    assert list(line) == ["bench", "case", "unit", "ours", "baseline", "ratio"]
    assert (line["ours"], line["baseline"], line["ratio"]) == (0.25, 1.0, 4.0)


def test_where_there_is_nothing_to_divide_there_is_no_ratio():
    for ours, baseline in ((None, 1.0), (1.0, None), (None, None), (0.0, 1.0)):
        line = bench_line("b", "c", "s", ours, baseline)
        assert (line["ours"], line["baseline"], line["ratio"]) == (ours, baseline, None)
    assert bench_line("b", "c", "s", 2.0, 0.0)["ratio"] == 0.0
