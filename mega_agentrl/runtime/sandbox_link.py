"""The driver's end of one sandbox host's process: calls with numbers.

`ask` consumes a method and its arguments and produces what the host answers. It waits for the
host; unblocked by the answer, by the death of the process, by `cut` (the keeper found the host
silent, or the group is closed) or by cancellation, which ends the call on the host too. The
calls may come from any event loop and any thread.

Nothing is sent twice here. Whether a call that got no answer has run is not known.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray.exceptions

from mega_agentrl.sandbox.supervisor import SandboxLostError


class HostLink:
    """One process, from its start to its loss.

    num_sessions: that the driver holds on it. num_replaced: sandboxes it has lost so far.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.num_sessions = 0
        self.num_replaced = 0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._cut = ""

    @property
    def load(self) -> int:
        """Sessions, and calls without an answer yet."""
        return self.num_sessions + len(self._calls)

    @property
    def is_cut(self) -> bool:
        """Whether the process is known to be lost."""
        return bool(self._cut)

    def new_number(self) -> int:
        """The number of the next call, larger than all before."""
        return next(self._numbers)

    async def ask(self, number: int, method: str, *arguments: Any) -> Any:
        """The host's answer to the call of that number.

        Raises `SandboxLostError` where there is none; `started` is False where nothing was sent.
        """
        call: Future[Any] = Future()
        with self._lock:
            if self._cut:
                raise SandboxLostError(self._cut, started=False)
            self._calls.add(call)
        try:
            sent = getattr(self.actor, method).remote(number, *arguments)
            sent.future().add_done_callback(partial(self._settle, call, method))
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self.tell("cancel", number)
            raise
        finally:
            self._take(call)

    def tell(self, method: str, *arguments: Any) -> None:
        """Send without waiting; a host that is lost needs not to know."""
        if not self._cut:
            getattr(self.actor, method).remote(*arguments)

    def cut(self, why: str) -> None:
        """The process is lost: every running call ends now, and no new one is sent."""
        with self._lock:
            self._cut = self._cut or why
            calls, self._calls = self._calls, set()
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(SandboxLostError(why, started=True))

    def _take(self, call: Future[Any]) -> bool:
        """Whoever takes the call off the list is the one to end it."""
        with self._lock:
            there = call in self._calls
            self._calls.discard(call)
        return there

    def _settle(self, call: Future[Any], method: str, answer: Future[Any]) -> None:
        if not self._take(call) or not call.set_running_or_notify_cancel():
            return
        error = answer.exception()
        if error is None:
            call.set_result(answer.result())
        elif isinstance(error, ray.exceptions.RayActorError):
            why = f"{method}: {self.name} died; its log file under logs/ in the run folder says why"
            # Before its caller asks again: the keeper may notice later than that.
            self.cut(why)
            call.set_exception(SandboxLostError(why, started=True))
        else:
            why = f"{method} failed on {self.name}: {getattr(error, 'cause', None) or error!r}"
            call.set_exception(SandboxLostError(why, started=True))
