"""The end of a process does not wait for a call that blocks."""

import subprocess
import sys

BLOCKED = """
import asyncio, threading
from mega_agentrl.rollout.agents.daemon_thread import DaemonThread

async def main():
    begun = threading.Event()
    call = DaemonThread("blocked").call(lambda: (begun.set(), threading.Event().wait()))
    await asyncio.to_thread(begun.wait)
    call.cancel()

asyncio.run(main())
print("ended")
"""


def test_a_process_ends_while_a_call_blocks():
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED], timeout=300, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "ended\n"
