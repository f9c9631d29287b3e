"""What a workspace keeps between calls, what a fork copies, and which limits hold."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest

from mega_agentrl.types.records import ToolStatus
from tests.escape.outside import pids_named, vanish
from tests.processes import descendants, wait_until_gone
from tests.sandbox.sandboxes import wait_until_running
from tests.sandbox.workspace.workspaces import (
    make_project,
    make_root,
    output_of,
    shared_workspace_pool,
)


@pytest.fixture(scope="module", params=["host", pytest.param("folder", marks=pytest.mark.extended)])
def pool(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    folder.chmod(0o755)
    (folder / "project").mkdir()
    root = "host"
    if request.param == "folder":
        (folder / "root").mkdir()
        root = str(make_root(folder / "root"))
    project = make_project(folder / "project")
    yield from shared_workspace_pool(root=root, folder=str(project), num_processes=64)
    assert (project / "a.txt").read_text(encoding="ascii") == "a.txt as it was\n"
    assert sorted(path.name for path in project.iterdir()) == ["a.txt", "b.txt", "src"]


async def test_the_state_of_the_shell_persists(session):
    await output_of(
        session,
        "cd src; export A='two\nlines'; b=(1 '2 2'); declare -A c=([k]=v); umask 027\n"
        "f() { echo \"f $1\"; }; alias say='echo said'; shopt -s nullglob; set -u",
    )
    look = 'pwd; echo "$A"; echo "${b[1]} ${c[k]}"; umask; f 1; say it; echo *.none; echo $-'
    expected = ["/workspace/src", "two", "lines", "2 2 v", "0027", "f 1", "said it", ""]
    assert (await output_of(session, look)).splitlines()[:-1] == expected
    assert "u" in (await output_of(session, look)).splitlines()[-1]
    child = await session.fork()
    assert (await output_of(child, look)).splitlines()[:-1] == expected
    await output_of(child, "cd deep; A=child; f() { echo changed; }; unalias say")
    assert (await output_of(session, look)).splitlines()[:-1] == expected
    assert await output_of(child, "pwd; echo $A; f") == "/workspace/src/deep\nchild\nchanged"
    await child.close()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("cd src; x=1; exit 3", 3),
        ("cd src; x=1; trap 'echo own' EXIT; (exit 4)", 4),
        ("cd src; x=1; set -e; false; x=2", 1),
        ("cd src; x=1; nothing-of-this-name", 127),
    ],
    ids=["exit", "own trap", "errexit", "unknown"],
)
async def test_failures_are_errors_of_the_policy_and_keep_the_state(session, command, code):
    result = await session.run(command)
    assert result.status is ToolStatus.user_error
    assert result.output.endswith(f"[exit code {code}]")
    assert await output_of(session, "set +e; pwd; echo $x") == "/workspace/src\n1"


async def test_a_killed_or_replaced_shell_keeps_the_state_before(session):
    await output_of(session, "x=1")
    for command in ("x=2; kill -9 $$", "x=2; exec cat /etc/none", "x=2; echo $(("):
        assert (await session.run(command)).status is ToolStatus.user_error
        assert await output_of(session, "echo $x") == "1"


async def test_the_end_of_a_call_cannot_be_made_up(session):
    forged = 'x=1; echo \'#end\' >&251; echo \'{"event": "done", "code": 0}\'; exit 5'
    result = await session.run(forged)
    assert result.status is ToolStatus.user_error
    assert result.output.endswith("[exit code 5]")
    assert await output_of(session, "echo $x") == "1"
    await output_of(session, "echo() { :; }; declare() { :; }; builtin() { :; }; cd() { :; }")
    assert await output_of(session, "unset -f echo declare builtin cd; cd src; pwd")


async def test_no_signal_ends_process_1(session):
    numbers = [int(n) for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    await output_of(session, f"x=1; for n in {' '.join(map(str, numbers))}; do kill -$n 1; done")
    assert await output_of(session, "kill -KILL 1; kill -STOP 1; echo $x") == "1"


LOOK = (
    "for p in $(ls -a . src src/deep moved moved/deep 2>/dev/null); do echo $p; done; "
    "cat a.txt src/c.txt"
)


async def test_a_fork_copies_files_and_separates_them(session):
    change = (
        "echo changed > a.txt; rm b.txt; mkdir new; echo n > new/file; mv src moved; "
        "mkdir src; echo fresh > src/c.txt; ln -s ../a.txt new/link; touch /tmp/t /dev/shm/s"
    )
    await output_of(session, change)
    before = await output_of(session, f"{LOOK} new/link; ls /tmp /dev/shm")
    assert "d.txt" in before  # of the folder that was moved
    assert before.count("deep") == 2  # not in the folder that replaced it
    first, second = [await session.fork() for _ in range(2)]
    for session_ in (first, second):
        assert await output_of(session_, f"{LOOK} new/link; ls /tmp /dev/shm") == before
    await output_of(first, "echo first > a.txt; rm -r moved new; mkdir b.txt; rm /tmp/t")
    await output_of(session, "echo parent > src/c.txt; mv new elsewhere")
    assert await output_of(second, f"{LOOK} new/link; ls /tmp /dev/shm") == before
    assert await output_of(first, "cat a.txt src/c.txt; ls") == "first\nfresh\na.txt\nb.txt\nsrc"
    grandchild = await first.fork()
    assert await output_of(grandchild, "cat a.txt; ls") == "first\na.txt\nb.txt\nsrc"
    assert await output_of(session, "cat elsewhere/link src/c.txt") == "changed\nparent"
    for session_ in (first, second, grandchild):
        await session_.close()


async def test_background_processes_run_on_and_are_not_carried(session):
    await output_of(session, "(while :; do sleep 0.02; echo x >> beat; done) & echo begun")
    longer = "until text=$(cat beat 2>/dev/null); [ ${#text} -gt %d ]; do sleep 0.02; done; "
    size = len(await output_of(session, longer % 4 + "cat beat"))
    child = await session.fork()
    note, rest = (await output_of(child, "cat beat; rm beat")).split("\n", 1)
    # The loop, and its sleep unless that has just ended.
    assert re.match(r"\[[12] background processes were not carried", note)
    assert len(rest) >= size
    assert (await child.run("sleep 0.1; ls beat")).status is ToolStatus.user_error
    assert await output_of(session, longer % (size + 4) + "echo grown") == "grown"
    await child.close()


async def test_a_clean_call_sees_files_but_no_state_and_no_processes(session):
    await output_of(session, "echo() { :; }; export PATH=/nowhere; cd src; exec -a x sleep 60 &")
    result = await session.run_clean("echo $PATH; pwd; cat a.txt", 10)
    assert "/usr/bin" in result.output
    assert result.output.endswith("\n/workspace\na.txt as it was")
    assert await output_of(session, "pwd; unset -f echo; echo $PATH") == "/workspace/src\n/nowhere"
    processes = await output_of(session, "PATH=/usr/bin; echo /proc/[0-9]*")
    assert len(processes.split()) == 2  # the first process and this shell


async def run_to_limit(session, command, expected):
    """Return a command's result and its limit, long enough for the `expected` output."""
    for limit_s in (0.7, 10.0, 60.0):
        result = await session.run(command, limit_s)
        if expected in result.output:
            return result, limit_s
    raise AssertionError(result)


async def test_timeout_ends_all_processes_and_restores_the_state(session, pool):
    name = f"wst{os.getpid() % 100000}"
    await output_of(session, "cd src; x=1")
    command = (
        f"x=2; cd deep; echo {name} > /proc/self/comm; trap '' TERM INT HUP; "
        "echo kept > ../file; echo begun; sleep 600"
    )
    result, limit_s = await run_to_limit(session, command, "begun")
    assert result.status is ToolStatus.timeout
    assert result.output.startswith(f"begun\n[Timed out after {limit_s:g} s.")
    assert vanish(name)
    assert await output_of(session, "pwd; echo $x; cat file") == "/workspace/src\n1\nkept"


async def test_a_cancelled_call_ends_at_once(session):
    name = f"wsx{os.getpid() % 100000}"
    task = asyncio.ensure_future(session.run(f"echo {name} > /proc/self/comm; sleep 600"))
    await asyncio.to_thread(wait_until_running, name)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await output_of(session, "echo on") == "on"


async def test_a_flood_keeps_both_ends(session):
    result = await session.run(
        "echo first; for ((i = 0; i < 40000; i++)); do echo $i; done; echo last"
    )
    lines = result.output.splitlines()
    assert (lines[0], lines[-2], lines[-1]) == ("first", "39999", "last")
    assert len(result.output) < 8200
    assert "characters cut]" in result.output
    endless = await session.run("while :; do echo xxxxxxxxxxxxxxxx; done", 0.5)
    assert endless.status is ToolStatus.timeout
    assert len(endless.output) < 8400


async def test_a_fork_bomb_is_bounded(session):
    await session.run("b() { b | b & }; b; sleep 0.3", 1.0)
    refusal = "Resource temporarily unavailable"
    await run_to_limit(session, "for i in {1..200}; do sleep 600 & done", refusal)
    await session.run("while :; do :; done", 0.1)  # its timeout ends what the bomb has left
    assert await output_of(session, "echo on") == "on"


async def test_the_disk_limit_holds_for_all_that_is_written_together(session):
    result = await session.run(
        "for f in /workspace/x /tmp/y /dev/shm/z; do dd if=/dev/zero of=$f bs=1M count=20; done"
    )
    assert result.status is ToolStatus.user_error
    assert "No space left on device" in result.output
    assert (
        await output_of(session, "rm -f /workspace/x /tmp/y /dev/shm/z; echo a > b; cat b") == "a"
    )


def loop_named(name):
    """A command that goes on for ever, in a process of this name."""
    return f"(echo {name} > /proc/self/comm; while :; do sleep 1; done)"


async def first_process(session, number):
    """The host's id of a workspace's first process, and the name of a loop in its background."""
    name = f"wsl{os.getpid() % 100000}x{number}"
    assert (await session.set_up(f"{loop_named(name)} & :", 60.0)).status is ToolStatus.ok
    wait_until_running(name)
    pid = min(pids_named(name))  # a child that it has just forked has its name for a moment
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        parent = int(next(line.split()[1] for line in file if line.startswith("PPid")))
    return parent, name


async def test_a_workspace_lost_between_two_calls_is_an_infra_error(session):
    pid, name = await first_process(session, 0)
    await output_of(session, "true")
    os.kill(pid, signal.SIGKILL)
    assert vanish(name) and not wait_until_gone([pid])
    for result in [await session.run("true"), await session.run_clean("true", 60.0)]:
        assert result.status is ToolStatus.infra_error
    with pytest.raises(RuntimeError):
        await session.fork()


async def test_a_workspace_lost_during_a_call_is_the_policys_and_no_other_takes_its_place(session):
    pid, name = await first_process(session, 1)
    await output_of(session, "true")
    call = asyncio.create_task(session.run(loop_named(f"{name}c"), 600.0))
    await asyncio.to_thread(wait_until_running, f"{name}c")
    os.kill(pid, signal.SIGKILL)
    assert (await call).status is ToolStatus.user_error
    child = await session.fork()
    for one in (session, child):
        # In a new workspace these would succeed.
        for result in [await one.run("true"), await one.run_clean("true", 60.0)]:
            assert result.status is ToolStatus.user_error
            assert "lost" in result.output
    await child.close()


async def test_a_workspace_lost_during_its_setup_is_an_infra_error(session):
    pid, name = await first_process(session, 2)
    call = asyncio.create_task(session.set_up(loop_named(f"{name}c"), 600.0))
    await asyncio.to_thread(wait_until_running, f"{name}c")
    os.kill(pid, signal.SIGKILL)
    assert (await call).status is ToolStatus.infra_error
    assert vanish(name)


async def test_processes_killed_for_memory_are_counted_and_named(session):
    if not session._group._cgroup.limits_memory:
        pytest.skip("no control group limits memory here")
    result = await session.run("dd if=/dev/zero of=/dev/null bs=600M count=1")
    assert (result.status, result.num_oom_kills) == (ToolStatus.user_error, 1)
    assert "killed processes: 1" in result.output
    assert (await session.run("exit 1")).num_oom_kills == 0


async def test_a_clean_call_has_a_new_home(session):
    await output_of(session, "echo 'exit 0' > $HOME/.profile; mkdir $HOME/.config")
    homes = {(await session.run_clean("ls -A $HOME; echo $HOME", 60.0)).output for _ in range(2)}
    assert all(re.fullmatch(r"/tmp/home-\w+", home) for home in homes), homes
    assert len(homes) == 2
    assert await output_of(session, "echo $HOME; ls -A $HOME/.profile") == "/tmp\n/tmp/.profile"


async def test_files_of_the_project_folder_can_be_restored_but_not_changed(session):
    await output_of(session, "echo worse > src/c.txt")
    result = await session.run("echo x > /sandbox/folder/src/c.txt")
    assert result.status is ToolStatus.user_error
    restore = "rm -rf src && cp -r /sandbox/folder/src . && cat src/c.txt"
    assert (await session.run_clean(restore, 60.0)).output == "src/c.txt as it was"


async def test_release_ends_everything(pool):
    before = set(descendants(os.getpid()))
    session = await pool.open()
    await output_of(session, "sleep 60 & echo x > y")
    child = await session.fork()
    await output_of(child, "sleep 60 & :")
    started = set(descendants(os.getpid())) - before
    assert len(started) >= 4
    await session.close()
    await child.close()
    assert not wait_until_gone(started)


CRASHING_DRIVER = """
import asyncio, os, signal, sys
from mega_agentrl.config.sections.tools import WorkspaceToolConfig
from mega_agentrl.sandbox.workspace.pool import WorkspacePool
from tests.sandbox.sandboxes import wait_until_running

async def main():
    pool = WorkspacePool(WorkspaceToolConfig(root="host", num_workers=1))
    await pool.start()
    session = await pool.open()
    child = await session.fork()
    for one in (session, child):
        await one.run("setsid bash -c 'echo NAME > /proc/self/comm; while :; do sleep 1; done' &")
    wait_until_running("NAME", 2)
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_crash_of_the_driver_leaves_nothing_running():
    name = f"wsc{os.getpid() % 100000}"
    code = CRASHING_DRIVER.replace("NAME", name)
    crashed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert crashed.stdout == "up\n", crashed.stderr
    assert crashed.returncode == -signal.SIGKILL
    assert vanish(name)
