import pytest

from mega_agentrl.config.sections.ranges import check_range


def test_only_a_broken_range_raises_and_says_what_was_expected():
    check_range(True, "a.b", 1, "at least 1")
    with pytest.raises(ValueError, match=r"^a\.b=0: expected at least 1$"):
        check_range(False, "a.b", 0, "at least 1")
