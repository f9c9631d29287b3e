"""The worst attacks again with a launcher that is not root: everything holds there as well."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.escape.outside import end_all, pids_named, vanish, with_values
from tests.escape.test_bombs import CHILDREN, FORK_BOMB
from tests.escape.test_processes import KILL
from tests.escape.test_syscalls import ANYBODY, EPERM, encoded
from tests.escape.test_writes import MOUNT

ROOT = Path(__file__).parents[2]
USER = "61537"
MODES = [
    "stateful",
    *(pytest.param(mode, marks=pytest.mark.extended) for mode in ("stateless", "workspace")),
]
LIMIT_S = 60.0


def as_user(*command):
    if os.getuid():
        return list(command)
    return ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", *command]


def run(command, **keywords):
    """A command to its end, of which only errors matter."""
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(command, cwd="/", **(options | keywords))


@pytest.fixture(scope="module")
def launcher():
    """Command and environment of an interpreter with our package that any user may run."""
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory(prefix="escape") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(ROOT / "mega_agentrl", folder / "mega_agentrl")
        for program in ("user_pool.py", "workspace_target.py"):
            shutil.copy(Path(__file__).with_name(program), folder)
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([name, *places])}
        check = (
            "import sys; open(sys.executable, 'rb'); import mega_agentrl.sandbox.pool, pyseccomp"
        )
        for python in (sys.executable, "/usr/bin/python3"):
            if run(as_user(python, "-B", "-c", check), env=environment).returncode == 0:
                yield as_user(python, "-B", str(folder / "user_pool.py")), environment
                return
    pytest.skip("no interpreter that a user without rights may run")


def attack(launcher, mode, *codes, fork=False):
    """Return the outcome of each code under a launcher without rights; see `user_pool`.

    A code may be a pair with its time limit.
    """
    command, environment = launcher
    codes = [(code, LIMIT_S) if isinstance(code, str) else code for code in codes]
    job = json.dumps({"mode": mode, "codes": codes, "fork": fork})
    done = run([*command, job], env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_bomb_is_stopped_by_a_launcher_that_is_not_root(launcher, mode, tmp_path, marker):
    tmp_path.chmod(0o777)
    free = as_user("/usr/bin/python3", "-c", with_values(CHILDREN, name=marker, bound=200, hold=1))
    with subprocess.Popen(free, stdout=subprocess.PIPE, cwd="/", text=True) as child:
        assert child.stdout.readline() == "made 200\n"
        assert len(pids_named(marker)) == 201
        end_all(marker)
    children = with_values(CHILDREN, name=marker, bound=200, hold=False)
    bomb = with_values(FORK_BOMB, name=marker, bound=10**9)
    results = attack(launcher, mode, children, (bomb, 0.5), "print(6 * 7)")
    assert "made 200" not in results[0][1]
    assert results[1][0] in ("timeout", "user_error")
    assert results[2][0] == "ok"
    assert results[2][1].splitlines()[-1] == "42"
    assert vanish(marker)


@pytest.mark.parametrize(
    ("mode", "codes", "expected"),
    [
        ("stateful", ("x = 5; open('f', 'w').write('g')", "print(x, open('f').read())"), "5 g"),
        pytest.param(
            "workspace",
            ("open('f', 'w').write('g')", "print(open('f').read())"),
            "g",
            marks=pytest.mark.extended,
        ),
    ],
    ids=["stateful", "workspace"],
)
def test_a_fork_answers_as_its_parent_under_a_launcher_that_is_not_root(
    launcher, mode, codes, expected
):
    results = attack(launcher, mode, *codes, fork=True)
    assert results[1:] == [["ok", expected]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_calls_mounts_and_signals_are_refused_under_a_launcher_that_is_not_root(launcher, mode):
    with subprocess.Popen(as_user("/bin/sleep", "600")) as victim:
        kill = with_values(KILL, pids=[victim.pid, os.getpid()])
        (_, calls), (_, mounts), (_, sent), last = attack(
            launcher, mode, encoded(ANYBODY), MOUNT, kill, "print(6 * 7)"
        )
        assert victim.poll() is None
        free = run(as_user("/usr/bin/python3", "-c", with_values(KILL, pids=[victim.pid])))
        assert free.stdout.strip() == "sent 2"
    passed = {name: code for name, code in json.loads(calls).items() if code not in (EPERM, 38, 97)}
    assert not passed
    said = {line.split(" ", 1)[1] for line in mounts.splitlines() if line != "no map"}
    assert said == {"Operation not permitted"}
    assert sent == "sent 0"
    assert last == ["ok", "42"]
