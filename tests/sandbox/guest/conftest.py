import pytest


@pytest.fixture
def session(stateful):
    """A session of the module's guest program."""
    made = stateful.open_session()
    yield made
    made.close()
