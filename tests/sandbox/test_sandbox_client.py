"""One sandbox: a loss says whether the code may have run; a cancelled call ends at once."""

import threading

import pytest

from mega_agentrl.sandbox.client import CancelToken, OrderRefusedError, Sandbox, SandboxLostError
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.syscall_filter import seccomp_filter_base64
from mega_agentrl.types.records import ToolStatus
from tests.sandbox.sandboxes import named, wait_until_running


def make_sandbox(**changes):
    return Sandbox(GuestSettings(seccomp_filter=seccomp_filter_base64(stateful=False), **changes))


@pytest.fixture
def sandbox():
    box = make_sandbox()
    yield box
    box.close()


def once_running(name, act):
    """Calls `act` from another thread as soon as code of that name runs."""

    def watch():
        wait_until_running(name)
        act()

    threading.Thread(target=watch).start()


def test_calls_are_independent(sandbox):
    assert sandbox.call("x = 5; print(x)", 10).output == "5"
    result = sandbox.call("print(x)", 10)
    assert result.status is ToolStatus.user_error
    assert result.output.endswith("NameError: name 'x' is not defined")


def test_killed_before_the_call_has_not_started(sandbox):
    sandbox.kill()
    with pytest.raises(SandboxLostError) as lost:
        sandbox.call("print(1)", 10)
    assert not lost.value.may_have_run


def test_killed_during_the_call_has_started(sandbox):
    code, name = named("import time; time.sleep(600)")
    once_running(name, sandbox.kill)
    with pytest.raises(SandboxLostError) as lost:
        sandbox.call(code, 600)
    assert lost.value.may_have_run


def test_cancelled_during_the_call(sandbox):
    cancel_token = CancelToken()
    code, name = named("import time; time.sleep(600)")
    once_running(name, cancel_token.cancel)
    result = sandbox.call(code, 600, cancel_token)
    assert result.status is ToolStatus.infra_error
    cancel_token.cancel()  # too late: the next call is not its call
    assert sandbox.call("import time; time.sleep(0.2); print(1)", 10).output == "1"


def test_cancelled_before_the_call(sandbox):
    cancel_token = CancelToken()
    cancel_token.cancel()
    with pytest.raises(OrderRefusedError, match="cancelled"):
        sandbox.call("print(1)", 10, cancel_token)
    assert sandbox.call("print(2)", 10).output == "2"


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(SandboxLostError, match="No module named 'no_such_module'") as lost:
        make_sandbox(preload_modules=("no_such_module",))
    assert not lost.value.may_have_run


def test_a_filter_that_cannot_be_installed_is_named():
    with pytest.raises(SandboxLostError, match="install the system call filter"):
        Sandbox(GuestSettings(seccomp_filter="AAAA"))
