"""The warm-up before the first call."""

import gc
import sys

import pytest

from mega_agentrl.sandbox.guest.warm_up import WARM_UP_CODE, warm_up_interpreter


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", WARM_UP_CODE)
def test_each_first_use_runs_and_leaves_nothing_in_main(name):
    main = set(vars(sys.modules["__main__"]))
    warm_up_interpreter([name])
    assert name in sys.modules
    assert set(vars(sys.modules["__main__"])) == main


def test_a_module_that_is_not_there():
    with pytest.raises(ImportError, match="no_such_module_at_all"):
        warm_up_interpreter(["no_such_module_at_all"])


def test_what_is_there_is_kept_from_the_collector():
    warm_up_interpreter([])
    assert gc.get_freeze_count() > 0
