from __future__ import annotations

import os
import signal

import pytest

from tests.parallel import pool_jobs
from tests.parallel.pool import RankError, RankPool


@pytest.fixture
def pool(tmp_path):
    found = RankPool(tmp_path)
    yield found
    found.close()


def test_a_failing_rank_ends_its_waiting_peers_and_the_next_job_runs(pool):
    before = pool.run(pool_jobs.pid, 2)
    with pytest.raises(RankError, match=r"rank 1 of 2 failed[\s\S]*ZeroDivisionError"):
        pool.run(pool_jobs.fail_on_last, 2)
    assert pool.pids == []
    assert not any(_alive(pid) for pid in before)
    after = pool.run(pool_jobs.pid, 2)
    assert not set(before) & set(after)


def test_a_dead_rank_is_named_with_its_log(pool):
    with pytest.raises(RankError, match=r"rank 0 died[\s\S]*last words"):
        pool.run(pool_jobs.die, 1)


def test_a_late_rank_is_named_with_its_stack(tmp_path):
    pool = RankPool(tmp_path, deadline_s=3.0)
    try:
        with pytest.raises(RankError, match=r"rank 0 still busy after 3\.0 s[\s\S]*in sleep"):
            pool.run(pool_jobs.sleep, 1)
    finally:
        pool.close()


def test_a_process_that_died_between_jobs_is_noticed_and_replaced(pool):
    (pid,) = pool.run(pool_jobs.pid, 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match="died"):
        pool.run(pool_jobs.pid, 1)
    assert pool.run(pool_jobs.pid, 1) != [pid]


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
