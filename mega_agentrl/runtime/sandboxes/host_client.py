"""Driver-side client of one sandbox host.

`call` sends a method with an id and waits for the answer. The wait ends with the answer, the death
of the process, `mark_lost` (the host is silent or the pool is closed) or cancellation, which also
cancels the call on the host. Calls may come from any event loop and any thread. The client never
retries, because it is unknown whether a call without an answer has run.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from mega_agentrl.runtime.remote_calls import DEATH_ERRORS, describe_death
from mega_agentrl.sandbox.client import SandboxLostError


class HostClient:
    """Client of one host process, from its start to its loss."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.num_sessions = 0
        """Number of sessions that the driver has open on the host."""
        self.num_replaced = 0
        """Number of sandboxes that the host has lost so far."""
        self._call_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pending_calls: set[Future[Any]] = set()
        self._lost_reason = ""

    @property
    def load(self) -> int:
        """Number of open sessions and unanswered calls."""
        return self.num_sessions + len(self._pending_calls)

    @property
    def is_lost(self) -> bool:
        """Whether the process is known to be lost."""
        return bool(self._lost_reason)

    def next_call_id(self) -> int:
        """Return a call id larger than all earlier ones."""
        return next(self._call_ids)

    async def call(self, call_id: int, method: str, *arguments: Any) -> Any:
        """Call a method of the host and return its answer.

        Raises:
            SandboxLostError: There is no answer; `may_have_run` is False if nothing was sent.
        """
        call: Future[Any] = Future()
        with self._lock:
            if self._lost_reason:
                raise SandboxLostError(self._lost_reason, may_have_run=False)
            self._pending_calls.add(call)
        try:
            ref = getattr(self.actor, method).remote(call_id, *arguments)
            ref.future().add_done_callback(partial(self._complete, call, method))
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self.notify("cancel", call_id)
            raise
        finally:
            self._claim(call)

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting; does nothing if the host is lost."""
        if not self._lost_reason:
            getattr(self.actor, method).remote(*arguments)

    def mark_lost(self, reason: str) -> None:
        """Declare the process lost: running calls fail now, and no new ones are sent."""
        with self._lock:
            self._lost_reason = self._lost_reason or reason
            calls, self._pending_calls = self._pending_calls, set()
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(SandboxLostError(reason, may_have_run=True))

    def _claim(self, call: Future[Any]) -> bool:
        """Remove a pending call; return False if another caller, which completes it, was first."""
        with self._lock:
            was_pending = call in self._pending_calls
            self._pending_calls.discard(call)
        return was_pending

    def _complete(self, call: Future[Any], method: str, answer: Future[Any]) -> None:
        if not self._claim(call) or not call.set_running_or_notify_cancel():
            return
        error = answer.exception()
        if error is None:
            call.set_result(answer.result())
        elif isinstance(error, DEATH_ERRORS):
            reason = f"{method}: {describe_death(self.name, error)}"
            # At once: the supervisor may notice only after the caller has tried again.
            self.mark_lost(reason)
            call.set_exception(SandboxLostError(reason, may_have_run=True))
        else:
            reason = f"{method} failed on {self.name}: {getattr(error, 'cause', None) or error!r}"
            call.set_exception(SandboxLostError(reason, may_have_run=True))
