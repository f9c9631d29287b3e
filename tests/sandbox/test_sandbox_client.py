"""One sandbox: a cancelled call ends at once or never begins, and costs no other call.

Losses of a sandbox are tested with the pool.
"""

import threading

import pytest

from mega_agentrl.sandbox.client import CancelToken, RequestRefusedError, Sandbox, SandboxLostError
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.syscall_filter import seccomp_filter_base64
from mega_agentrl.types.records import ToolStatus
from tests.sandbox.sandboxes import named, wait_until_running


@pytest.fixture
def sandbox():
    box = Sandbox(GuestSettings(seccomp_filter=seccomp_filter_base64(stateful=False)))
    yield box
    box.close()


def test_a_call_that_is_cancelled_ends_and_the_sandbox_works_on(sandbox):
    cancel_token = CancelToken()
    code, name = named("import time; time.sleep(600)")

    def cancel_once_running():
        wait_until_running(name)
        cancel_token.cancel()

    threading.Thread(target=cancel_once_running).start()
    assert sandbox.call(code, 600, cancel_token).status is ToolStatus.infra_error
    cancel_token.cancel()  # too late: the next call is not its call
    assert sandbox.call("import time; time.sleep(0.1); print(1)", 60).output == "1"


def test_a_call_that_was_cancelled_before_does_not_run(sandbox):
    cancel_token = CancelToken()
    cancel_token.cancel()
    with pytest.raises(RequestRefusedError):
        sandbox.call("print(1)", 60, cancel_token)
    assert sandbox.call("print(2)", 60).output == "2"


def test_a_filter_that_cannot_be_installed_is_an_error():
    with pytest.raises(SandboxLostError, match="system call filter") as lost:
        Sandbox(GuestSettings(seccomp_filter="AAAA"))
    assert not lost.value.may_have_run
