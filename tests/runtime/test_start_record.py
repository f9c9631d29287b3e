"""What ran is found out: the command, the commit of a repository, versions, the machine."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from mega_agentrl.runtime.start_record import collect_start, find_commit


def test_the_record_has_command_presets_versions_and_process():
    start = collect_start(["seed=2"], {"algo": "grpo"})
    assert (start.host, start.pid) == (socket.gethostname(), os.getpid())
    assert start.overrides == ("seed=2",) and start.presets == {"algo": "grpo"}
    assert start.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "megatron-core", "hydra-core"} <= set(start.versions)
    assert sys.orig_argv[-1].strip("'") in start.command
    assert int(start.machine["cores"]) >= 1


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_says_whether_files_were_changed(tmp_path):
    def git(*words):
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *name, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert find_commit(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "reward.py").write_text("a = 1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert find_commit(tmp_path) == commit
    (tmp_path / "reward.py").write_text("a = 2")
    assert find_commit(tmp_path) == f"{commit}-dirty"
