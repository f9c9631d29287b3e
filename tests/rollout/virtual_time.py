"""An event loop whose clock jumps to the next timer as soon as nothing else is ready.

Sleeps and timeouts take no time and fire in the same order on every machine, however busy: a
timeout expires only if everything waits for it. Not for coroutines that wait for a thread or a
process beside a timer, as the clock does not wait for those.
"""

from __future__ import annotations

import asyncio
import selectors


class _JumpingSelector(selectors.DefaultSelector):
    """Advances `now_s` by the time it is asked to wait, instead of waiting.

    A turn of the loop takes a microsecond, so that a coroutine may go round and round until a
    timer passes.
    """

    now_s = 0.0

    def select(self, timeout=None):
        self.now_s += 1e-6
        if not timeout:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time` starts at 0 and counts seconds slept."""

    def __init__(self):
        self._jumping_selector = _JumpingSelector()
        super().__init__(self._jumping_selector)

    def time(self):
        return self._jumping_selector.now_s


def run_virtually(coroutine):
    """`asyncio.run` on such a loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
