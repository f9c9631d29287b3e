"""A headless Chromium over its debugging pipe: open a page, run a script, click.

Debian's package by its path; nothing is downloaded, and nothing listens on a port. Messages
of the protocol are JSON that end in a zero byte, on the file descriptors 3 (in) and 4 (out).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

BROWSER = Path("/usr/bin/chromium")
DEADLINE_S = 300

needs_browser = pytest.mark.skipif(
    not BROWSER.is_file(), reason=f"{BROWSER} is missing: apt-get install chromium"
)


def _pipe():
    """A pipe whose ends have high numbers: the browser gets its own under the numbers 3 and 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return high


class Chromium:
    """A browser with one tab, as a context manager. `errors`: errors of the console."""

    def __init__(self, folder, *, width=1500, height=1000):
        self._folder = Path(folder)
        self._size = (width, height)
        self._last_id = 0
        self._events = []
        self._buffer = b""
        self._session = None
        self.errors = []

    def __enter__(self):
        to_read, self._to = _pipe()
        self._from, to_write = _pipe()
        command = f'exec "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
        arguments = [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            # Nothing of what a browser does for its user beside showing pages.
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-default-apps",
            "--disable-extensions",
            "--disable-sync",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder / 'profile'}",
            f"--window-size={self._size[0]},{self._size[1]}",
            "about:blank",
        ]
        with (self._folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command, "bash", *arguments],
                pass_fds=(to_read, to_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_read)
        os.close(to_write)
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self):
        """Talk to the browser's only tab from now on."""
        tabs = self.call("Target.getTargets")["targetInfos"]
        (tab,) = [one["targetId"] for one in tabs if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __exit__(self, *_):
        os.close(self._to)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(300)
        os.close(self._from)

    def call(self, method, **params):
        """One command of the protocol and its answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, address):
        """Load a page and wait until it has run its scripts; the seconds that took."""
        # Another part of a page that is open would not be loaded again.
        self._load("about:blank")
        return self._load(address)

    def _load(self, address):
        self._events.clear()
        start = time.monotonic()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in [event["method"] for event in self._events]:
            self._note(self._read(start + DEADLINE_S, "load"))
        return time.monotonic() - start

    def run(self, script):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector, *, share=0.5):
        """Click on an element; share: where along its width."""
        box = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        x, y = box[0] + share * box[2], box[1] + box[3] / 2
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def requests(self):
        """Addresses the page asked for."""
        found = [one for one in self._events if one["method"] == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in found]

    def _note(self, event):
        self._events.append(event)
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(params)

    def _read(self, deadline, what):
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(0, left))
            assert ready, f"Chromium did not answer to {what} within {DEADLINE_S} s"
            got = os.read(self._from, 1 << 20)
            log = (self._folder / "chromium.log").read_text(errors="replace")[-2000:]
            assert got, f"Chromium ended: {log}"
            self._buffer += got
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)
