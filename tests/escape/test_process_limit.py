"""No process of a session ever runs under a limit of processes that was raised for a fork.

The kernel forces us to raise it for the clone of a fork (`guest.interpreter_manager`).
"""

import json

import pytest

from tests.escape.outside import parameters, vanish, with_values
from tests.escape.test_neighbours import CHANNEL, refused

NUM_PROCESSES = 64

WATCH = """
import contextlib, ctypes, errno, resource, signal, threading
libc = ctypes.CDLL(None, use_errno=True)
made, limits = [], []
kept, awake = guest._fork_process, threading.Event()
def look(_=None):
    limits.append(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if limits[-1] > 64:
        open('/tmp/raised', 'w').close()
def rest():
    look()
    open('/proc/self/comm', 'w').write(name)
    time.sleep(60)
    os._exit(0)
def bomb():
    number = 0
    try:
        while number < 200:
            os.fork() or rest()
            number += 1
    except OSError:
        pass
    made.append(count())
def count():  # at once: a thread goes on when processes of an earlier fork have been killed
    names = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(f'/proc/{pid}/comm') as file:
            names.append(file.read().strip())
    return names.count(name)
def race():
    while True:
        pid = os.fork()
        if pid == 0:
            look()
            os._exit(0)
        os.waitpid(pid, 0)
os.register_at_fork(after_in_child=look, after_in_parent=look)
"""

IN_THE_WINDOW = {
    "refuses": """
def attack(settings):
    look(); bomb()
    raise OSError(errno.EPERM, 'refused')
""",
    "untraced clone": """
def attack(settings):
    libc.syscall(56, ctypes.c_long(0x00800011), 0, 0, 0, 0) or rest()  # CLONE_UNTRACED
    look(); bomb()
    raise OSError(errno.EPERM, 'refused')
""",
    "clones late": """
def attack(settings):
    look(); bomb()
    return kept(settings)
""",
    "left-over thread": """
def attack(settings):
    awake.set()
    time.sleep(0.3)
    return kept(settings)
threading.Thread(target=lambda: awake.wait() and bomb(), daemon=True).start()
""",
    "racing threads": """
def attack(settings):
    awake.set()
    return kept(settings)
for _ in range(4):
    threading.Thread(target=lambda: awake.wait() and race(), daemon=True).start()
""",
    "signals during the clone": """
def attack(settings):
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.05)
    try:
        return kept(settings)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        look()
signal.signal(signal.SIGALRM, lambda *_: look())
""",
}


@pytest.mark.parametrize(
    "kind", parameters(IN_THE_WINDOW, quick={"refuses", "untraced clone", "racing threads"})
)
async def test_the_limit_is_not_raised_for_code_that_runs(pool, marker, kind):
    session = await pool.open()
    code = CHANNEL + with_values(WATCH, name=marker) + IN_THE_WINDOW[kind]
    begun = await session.run(code + "guest._fork_process = attack")
    assert begun.status.value == "ok", begun
    children = []
    for _ in range(3):
        try:
            children.append(await session.fork())
        except RuntimeError:
            assert kind != "signals during the clone"
        assert vanish(marker)
    for one in (session, *children):
        seen = await one.run("print([max(limits), max(made, default=0), os.listdir('/tmp')])")
        limit, number, files = json.loads(seen.output.replace("'", '"'))
        assert limit == NUM_PROCESSES
        assert number < NUM_PROCESSES
        assert files == []
        await one.close()


REFUSE = """
import errno
def spin(settings):
    for _ in range(4):
        if os.fork() == 0:
            open('/proc/self/comm', 'w').write(name)
            while True:
                pass
    time.sleep(0.2)
    raise OSError(errno.EPERM, 'refused')
guest._fork_process = spin
"""


async def test_a_refused_fork_leaves_nothing_running(pool, marker):
    session = await pool.open()
    code = CHANNEL + with_values(REFUSE, name=marker)
    assert (await session.run(code)).status.value == "ok"
    for _ in range(2):
        assert await refused(session)
        assert vanish(marker)
    await session.close()
