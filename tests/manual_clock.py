"""A clock that only the test advances."""


class ManualClock:
    """Returns `now_s` when it is called, as `time.monotonic` returns the time."""

    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s
