"""One small Ray for all tests of the runtime."""

import logging

import pytest
import ray


@pytest.fixture(scope="session")
def ray_local():
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 * 1024**2,
    )
    yield
    ray.shutdown()
