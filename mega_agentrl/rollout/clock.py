"""Clocks of a trajectory: one counts the seconds that the policy decides about, one the run's.

`rollout.trajectory_timeout_s`, with an agent also its `timeout_s`, bounds both, each by itself:

* The policy decides how long its calls run and how much it writes. With an agent it decides about
  everything between its answers, because the agent runs its calls there. Where this time is used
  up, the trajectory has reached a limit (`StopReason.time_limit`) and is scored.
* The run takes what remains: queues and stalls of engines, the creation and copies of tools, free
  slots of tools, simulated users, an agent before the first answer. Where this time is used up, the
  trajectory is masked (`StopReason.trajectory_timeout`).

What the policy does takes no time of the run, so that no policy can have its attempt masked: it
neither comes closer to the mask by waiting, nor can it fill up what a slow machine has left of a
common limit. And no time of the machine is taken from the policy: an attempt on a slow
machine has as long for its own calls as any other. The price is that a trajectory may take up to
twice the limit.

The time of a request to an engine is the policy's as far as requests of the pass usually take as
long (`SamplingSpeed`); the rest is a queue, a pause or a stall. Many turns and long answers
therefore use up the policy's time, and slow engines do not. The number of tokens is known when the
request ends: one that is under way goes on until both clocks together are used up.

Rewards are computed after the clocks have stopped, and have limits of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from math import inf
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_REQUESTS = 255
"""Requests of a pass whose speeds are compared: enough that a pause of the engines, which makes the
requests slow that are under way, is not taken for the usual, and few enough to sort for each."""


class SamplingSpeed:
    """How long recent requests of a pass took, each and per token."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=NUM_REQUESTS)
        self._seconds_per_token: deque[float] = deque(maxlen=NUM_REQUESTS)

    def add(self, seconds: float, num_tokens: int) -> None:
        """Add a request that has ended by itself."""
        if num_tokens:
            self._seconds.append(seconds)
            self._seconds_per_token.append(seconds / num_tokens)

    def usual_s(self, num_requests: int, num_tokens: int) -> float:
        """Return how long requests usually take, by the medians.

        A request with few tokens takes as long as the median of all, because each waits for its
        turn and its context is computed.

        Args:
            num_requests: Number of requests, those without a token left out.
            num_tokens: Number of tokens of all of them.

        Returns:
            The time in seconds; 0 without a token, infinite if no request has ended yet.
        """
        if not num_requests:
            return 0.0
        if not self._seconds:
            return inf
        by_token = num_tokens * median(self._seconds_per_token)
        return max(by_token, num_requests * median(self._seconds))


class TrajectoryClock:
    """The two clocks of a trajectory; `start` and `stop` them.

    Args:
        limit_s: Limit of each of them; 0 is none.
        speed: The speed of the engines in the pass.
        is_agent: Whether all that happens between the policy's answers is the policy's.
    """

    def __init__(
        self, limit_s: float = 0.0, speed: SamplingSpeed | None = None, *, is_agent: bool = False
    ) -> None:
        self.policy_s = 0.0
        """Seconds that the policy decided about."""
        self.run_s = 0.0
        """Seconds of the run."""
        self._limit_s = limit_s or inf
        self.speed = speed or SamplingSpeed()
        self._is_agent = is_agent
        self._is_policys_turn = False
        self._waits_for_run = False
        self._num_sampling = 0
        self._num_sampled = (0, 0)
        """Requests and tokens that have come from those under way at the same time."""
        self._sampling_s = 0.0
        """Seconds of the requests under way, whose share of both clocks is not known yet."""
        self._counted_until_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_over: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether one of the clocks is used up."""
        is_used_up = max(self.policy_s, self.run_s) >= self._limit_s
        return is_used_up or self._total_s >= 2 * self._limit_s

    @property
    def is_policys(self) -> bool:
        """Whether the policy has taken more of the time than the run; to be asked once it is over.

        The clock that is used up is the larger one.
        """
        return self.policy_s >= self.run_s

    def start(self, on_over: Callable[[], None]) -> None:
        """Start the clocks, or go on with those of a parent.

        Args:
            on_over: Called once, when a clock is used up.
        """
        self._on_over = on_over
        if self._counted_until_s is None:
            self._counted_until_s = asyncio.get_running_loop().time()
        self._update()

    def stop(self) -> None:
        """Stop the clocks; safe to call twice."""
        self._count_time()
        self._on_over = self._counted_until_s = None
        self._set_timer(None)

    def fork(self) -> TrajectoryClock:
        """Return clocks that go on from here; until they are started, the run takes the time."""
        self._update()
        child = TrajectoryClock(self._limit_s, self.speed, is_agent=self._is_agent)
        child.policy_s, child.run_s = self.policy_s, self.run_s
        child._counted_until_s = self._counted_until_s
        return child

    @contextmanager
    def policys_turn(self) -> Iterator[None]:
        """Count what happens inside as the policy's, unless its calls wait for the run."""
        self._update(is_policys_turn=True)
        try:
            yield
        finally:
            self._update(is_policys_turn=False)

    def note_waiting(self, waits: bool) -> None:
        """Note whether all calls of the policy that are under way wait for the run."""
        self._update(waits_for_run=waits)

    def begin_sampling(self) -> None:
        """Count what follows as a request to an engine."""
        self._update()
        self._num_sampling += 1
        self._update()

    def end_sampling(self, num_tokens: int) -> None:
        """Count a request as ended.

        Args:
            num_tokens: Number of tokens that it sampled.
        """
        self._count_time()
        self._num_sampling -= 1
        num_requests, num_earlier = self._num_sampled
        self._num_sampled = num_requests + bool(num_tokens), num_earlier + num_tokens
        if self._is_agent and num_tokens:
            self._is_policys_turn = True
        if not self._num_sampling:
            seconds, self._sampling_s = self._sampling_s, 0.0
            policy_s = min(seconds, self.speed.usual_s(*self._num_sampled))
            self._num_sampled = (0, 0)
            self.policy_s += policy_s
            self.run_s += seconds - policy_s
        self._update()

    @property
    def _total_s(self) -> float:
        return self.policy_s + self.run_s + self._sampling_s

    def _count_time(self) -> None:
        """Count the time since it was last counted."""
        if self._counted_until_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        seconds, self._counted_until_s = now_s - self._counted_until_s, now_s
        if self._num_sampling:
            self._sampling_s += seconds
        elif self._is_policys_turn and not self._waits_for_run:
            self.policy_s += seconds
        else:
            self.run_s += seconds

    def _update(
        self, *, is_policys_turn: bool | None = None, waits_for_run: bool | None = None
    ) -> None:
        """Count the time up to now, change whose time follows, and wait for its end."""
        self._count_time()
        if is_policys_turn is not None:
            self._is_policys_turn = is_policys_turn
        if waits_for_run is not None:
            self._waits_for_run = waits_for_run
        if self._on_over is None or self._limit_s == inf:
            return
        if self.is_over:
            self._set_timer(None)
            on_over, self._on_over = self._on_over, None
            on_over()
        else:
            self._set_timer(self._left_s())

    def _left_s(self) -> float:
        """Return how long it takes until the clocks are over, if nothing changes."""
        if self._num_sampling:
            return 2 * self._limit_s - self._total_s
        is_policys = self._is_policys_turn and not self._waits_for_run
        return self._limit_s - (self.policy_s if is_policys else self.run_s)

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._update)
