"""Fake ranks that all tests of the groups share."""

import pytest
import ray

from tests.runtime.fake_ranks import FakeRank


@pytest.fixture(scope="session")
def _fake_ranks(ray_local):
    ranks = [FakeRank.remote(rank) for rank in range(2)]
    ray.get([rank.reset.remote() for rank in ranks], timeout=300)
    return ranks


@pytest.fixture
def fake_ranks(_fake_ranks):
    """Two ranks in their initial state, for tests that leave them alive."""
    ray.get([rank.reset.remote() for rank in _fake_ranks], timeout=300)
    return _fake_ranks
