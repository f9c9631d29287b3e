"""Attacks on the copying of a fork's files, which runs with more privileges."""

import pytest

from tests.escape.outside import outside, parameters

KEEP = "open('/tmp/kept', 'w').write('kept')\n"

TRAPS = {
    "pipes": "import os\nfor i in range(8): os.mkfifo(f'pipe{i}')",
    "sockets": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('/tmp/socket')",
    "holes": "for i in range(200):\n    with open(f'hole{i}', 'wb') as f: f.truncate(1 << 25)",
    "links out": (
        "import os\n"
        "for i, path in enumerate(['/proc/1/environ', '/proc/self/root', '/', '/proc/kcore',\n"
        "                          '/dev/zero', '/dev/full', 'link7', '../../../..']):\n"
        "    os.symlink(path, f'link{i}')"
    ),
    "hard links": (
        "import os\nopen('one', 'wb').write(b'x' * (1 << 20))\n"
        "for i in range(60): os.link('one', f'more{i}')"
    ),
    "depth": (
        "import os\nfor _ in range(700):\n    os.mkdir('a' * 60); os.chdir('a' * 60)\n"
        "os.chdir('/tmp')"
    ),
    "names": (
        "import os\n"
        "for name in (b'\\xff\\xfe', b'-rf', b'new\\nline', b'x' * 255, b'$(reboot)'):\n"
        "    open(b'/tmp/' + name, 'w').close()"
    ),
    "no rights": (
        "import os\nos.mkdir('closed')\nopen('closed/file', 'w').close()\n"
        "for path in ('closed/file', 'closed'): os.chmod(path, 0)\nos.chmod('/tmp', 0o500)"
    ),
    "elsewhere": "import os\nos.mkdir('/tmp/b')\nos.chdir('/tmp/b')\nos.rmdir('/tmp/b')",
}


def test_traps_defeat_a_naive_copy(tmp_path):
    """The naive copy hangs at a pipe, and turns holes into blocks."""
    (tmp_path / "from").mkdir()
    traps = TRAPS["pipes"] + "\n" + TRAPS["holes"].replace("200", "2")
    code = f"{traps}\nimport os\nprint(os.stat('hole1').st_blocks, len(os.listdir()))"
    assert outside(code, tmp_path / "from") == "0 10"
    copied = "data = open('hole1', 'rb').read(); open('copy', 'wb').write(data)\n"
    copied += "import os; print(os.stat('copy').st_blocks * 512 >= 1 << 25)"
    assert outside(copied, tmp_path / "from") == "True"
    hang = "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\n"
    hang += "open('pipe1').read()\nprint('read')"
    assert outside(hang, tmp_path / "from") == ""


@pytest.mark.parametrize("trap", parameters(TRAPS, quick={"pipes", "links out", "no rights"}))
async def test_a_trap_for_the_copy_harms_nobody(pool, trap):
    """The fork works or is refused; the parent and everybody else go on."""
    session = await pool.open()
    code = f"{KEEP}{TRAPS[trap]}\nprint('set')"
    assert (await session.run(code)).output.splitlines()[-1] == "set"
    try:
        child = await session.fork()
    except RuntimeError:
        child = None
    keeps = "print(open('/tmp/kept').read())"
    assert (await session.run(keeps)).output == "kept"
    if child is not None:
        assert (await child.run(keeps)).output == "kept"
        again = await child.run("import os; print(sorted(os.listdir('/tmp')) != [])")
        assert again.output == "True"
        await child.close()
    await session.close()
    assert (await pool.run("print(6 * 7)")).output == "42"


async def test_a_full_folder_is_forked_or_refused(pool):
    session = await pool.open()
    fill = (
        "i = 0\ntry:\n    while True:\n"
        "        with open(f'f{i}', 'wb') as f: f.write(bytes(1 << 20))\n"
        "        i += 1\nexcept OSError as error: print(error.strerror)"
    )
    assert (await session.run(fill)).output == "No space left on device"
    try:
        child = await session.fork()
    except RuntimeError:
        child = None
    if child is not None:
        assert (await child.run("print(i)")).output == (await session.run("print(i)")).output
        free = (
            "import os\nfor name in os.listdir('/tmp'): os.unlink(name)\nopen('a', 'w').write('1')"
        )
        assert (await child.run(free + "\nprint('free')")).output == "free"
        assert (await session.run("import os; print(os.path.exists('f0'))")).output == "True"
        await child.close()
    await session.close()


async def test_a_chain_of_forks_ends_in_an_error_not_a_crash(pool):
    chain = [await pool.open()]
    await chain[0].run("depth = 0")
    refused = ""
    while not refused and len(chain) < 40:
        assert (await chain[-1].run("depth += 1; print(depth)")).output == str(len(chain))
        try:
            chain.append(await chain[-1].fork())
        except RuntimeError as error:
            refused = str(error)
    assert "nested too deep" in refused
    assert 16 < len(chain) < 40
    assert (await chain[-1].run("print(depth)")).output == str(len(chain))
    for session in chain:
        await session.close()
    assert (await pool.run("print(6 * 7)")).output == "42"


async def test_forking_does_not_hand_out_the_filter(pool):
    """What the supervisor may order for a fork, the code may not have before or after it."""
    tries = (
        "import ctypes, threading, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "won = []\n"
        "def race():\n"
        "    while True:\n"
        "        for flags in (0x10000000, 0x3c020000, 0x38020000, 0x20000000):\n"
        "            if libc.unshare(flags) == 0: won.append(flags)\n"
        "threads = [threading.Thread(target=race, daemon=True) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "time.sleep(0.2)\nprint(won)"
    )
    session = await pool.open()
    assert (await session.run(tries)).output == "[]"
    children = [await session.fork() for _ in range(3)]
    assert (await session.run("print(won)")).output == "[]"
    mount = "print(libc.mount(b't', b'/tmp', b'tmpfs', 0, None), libc.unshare(0x10000000))"
    for runner in (*children, session):
        assert (await runner.run(mount)).output == "-1 -1"
    for runner in (*children, session):
        await runner.close()
