"""The error of a call that must be refused."""

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError


def refused_input(call, *arguments, error_type=InputError, **settings):
    """Return the error of the call; its message is one line."""
    with pytest.raises(error_type) as caught:
        call(*arguments, **settings)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def refused(call, *arguments, **settings):
    """Return the `ConfigError` of the call."""
    return refused_input(call, *arguments, error_type=ConfigError, **settings)


def refused_setting(call, *arguments, **settings):
    """Return key and value of the setting that the error names."""
    error = refused(call, *arguments, **settings)
    return error.key, error.got
