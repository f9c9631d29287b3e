from __future__ import annotations

import os
import signal

import pytest

from tests.parallel import pool_jobs
from tests.parallel.pool import RankError, RankPool


@pytest.fixture
def pool(tmp_path, rank_pool):
    """A pool of the test's own; `rank_pool` has started the server of both."""
    found = RankPool(tmp_path)
    yield found
    found.close()


def test_a_failing_rank_ends_its_waiting_peers_and_the_next_job_runs(pool):
    before = pool.run(pool_jobs.pid, 2)
    with pytest.raises(RankError) as caught:
        pool.run(pool_jobs.fail_on_last, 2)
    assert (caught.value.reason, caught.value.ranks) == ("failed", (1,))
    assert "ZeroDivisionError" in caught.value.details
    assert pool.pids == []
    assert not any(_alive(pid) for pid in before)
    after = pool.run(pool_jobs.pid, 2)
    assert not set(before) & set(after)


def test_a_dead_rank_is_named_with_its_log(pool):
    with pytest.raises(RankError) as caught:
        pool.run(pool_jobs.die, 1)
    assert (caught.value.reason, caught.value.ranks) == ("died", (0,))
    assert "last words" in caught.value.details


def test_a_late_rank_is_named_with_its_stack(pool):
    pool.run(pool_jobs.pid, 1)  # so that the rank has imported the module
    pool.deadline_s = 2.0
    with pytest.raises(RankError) as caught:
        pool.run(pool_jobs.sleep, 1)
    assert (caught.value.reason, caught.value.ranks) == ("late", (0,))
    assert "in sleep" in caught.value.details


def test_a_process_that_died_between_jobs_is_noticed_and_replaced(pool):
    (pid,) = pool.run(pool_jobs.pid, 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError) as caught:
        pool.run(pool_jobs.pid, 1)
    assert caught.value.reason == "died"
    assert pool.run(pool_jobs.pid, 1) != [pid]


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
