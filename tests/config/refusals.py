"""The `ConfigError` of a call that must be refused."""

import pytest

from mega_agentrl.config.errors import ConfigError


def refused(call, *arguments, **settings):
    """Return the error of the call; its message is one line."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **settings)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def refused_setting(call, *arguments, **settings):
    """Return key and value of the setting that the error names."""
    error = refused(call, *arguments, **settings)
    return error.key, error.got
