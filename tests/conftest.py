"""The smoke run's input in small, shared by all tests that need a model and data."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parents[1]


def _end_run(signum, frame):
    raise KeyboardInterrupt(f"ended by {signal.Signals(signum).name}, a deadline passed?")


def pytest_runtest_setup(item):
    """Ending the run by SIGTERM still shows its failures; tests of GPUs skip without one.

    The handler is set for each test, as Ray sets one of its own.
    """
    signal.signal(signal.SIGTERM, _end_run)
    if item.get_closest_marker("gpu") is not None:
        import torch  # not for tests that do without

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU, 0 found")


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A small tool-QA: model, data and corpus."""
    folder = tmp_path_factory.mktemp("toolqa")
    sizes = ("--num-train", "200", "--num-dev", "30", "--num-validation", "30")
    script = ROOT / "tools" / "make_tiny_model.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(folder), "--num-demonstrations", "400", *sizes],
        check=True,
        timeout=180,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory):
    """Rank processes for every test that needs some: started by the first, ended with the run."""
    from tests.parallel.pool import RankPool

    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
