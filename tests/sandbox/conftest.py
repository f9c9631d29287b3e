import pytest


@pytest.fixture
async def session(pool):
    """A session of the module's pool."""
    made = await pool.open()
    yield made
    await made.close()
