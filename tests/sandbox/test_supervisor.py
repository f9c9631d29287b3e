"""One sandbox: a loss says whether the code may have run."""

import threading
import time

import pytest

from mega_agentrl.sandbox.interpreter import Settings
from mega_agentrl.sandbox.supervisor import Sandbox, SandboxLostError
from mega_agentrl.types.records import ToolStatus


@pytest.fixture
def sandbox():
    box = Sandbox(Settings())
    yield box
    box.close()


def test_calls_are_independent(sandbox):
    assert sandbox.call("x = 5; print(x)", 10).output == "5"
    result = sandbox.call("print(x)", 10)
    assert result.status is ToolStatus.user_error
    assert result.output.endswith("NameError: name 'x' is not defined")


def test_killed_before_the_call_has_not_started(sandbox):
    sandbox.kill()
    with pytest.raises(SandboxLostError) as lost:
        sandbox.call("print(1)", 10)
    assert not lost.value.started


def test_killed_during_the_call_has_started(sandbox):
    timer = threading.Timer(0.5, sandbox.kill)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(SandboxLostError) as lost:
        sandbox.call("import time; time.sleep(30)", 30)
    assert lost.value.started
    assert time.monotonic() - begin < 5


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(SandboxLostError, match="No module named 'no_such_module'") as lost:
        Sandbox(Settings(preload=("no_such_module",)))
    assert not lost.value.started
