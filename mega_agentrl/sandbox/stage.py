"""Runs between the launcher and bubblewrap, as a program of its own: joins the sandbox's
cgroups, makes the interpreter's folders reachable and becomes the sandbox's own user.

`python -I -S stage.py JOB`, JOB being JSON: `cgroups` (files to write our process id to),
`user` (a user and group id to become, null to stay), `folders` (to be bound where that user
can reach them: the way to them may be closed to it, as /root is), `needed` (a program that
user must be able to run) and `command`, in which `{0}` stands for the place of the first
folder. Ends with `REFUSED` and a message where the user cannot read what it needs. Does
not isolate anything itself; the binds are in a mount namespace that nobody else sees.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

REFUSED = 97

_CLONE_NEWNS = 0x00020000
_MS_BIND_REC = 0x1000 | 0x4000
_MS_PRIVATE_REC = (1 << 18) | 0x4000
_PLACES = ("/mnt", "/media", "/srv")


def main(job: dict[str, Any]) -> None:
    """Does not return."""
    for path in job["cgroups"]:
        Path(path).write_text(str(os.getpid()), encoding="ascii")
    folders = list(job["folders"])
    if job["user"] is not None:
        folders = _reachable(folders)
        _become(job["user"])
        _check_readable(folders, job["folders"])
    command = [_placed(word, folders) for word in job["command"]]
    os.execv(command[0], command)


def _become(user: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        print(
            f"root may not become user {user} ({error}); expected the capabilities CAP_SETUID and "
            "CAP_SETGID. Probable cause: a container without them; start it with them, or run as "
            "another user than root",
            file=sys.stderr,
        )
        sys.exit(REFUSED)


def _placed(word: str, folders: list[str]) -> str:
    if word.startswith("{") and word.endswith("}") and word[1:-1].isdigit():
        return folders[int(word[1:-1])]
    return word


def _reachable(folders: list[str]) -> list[str]:
    """Where they are bound to; where they were, if this root may not mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_PRIVATE_REC, None):
        return folders
    sources = [os.open(folder, os.O_PATH) for folder in folders]
    place = next((path for path in _PLACES if Path(path).is_dir()), "/tmp")
    if libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"size=1m,mode=0755"):
        return folders
    placed = []
    for number, source in enumerate(sources):
        target = f"{place}/{number}"
        Path(target).mkdir()
        if libc.mount(f"/proc/self/fd/{source}".encode(), target.encode(), None, _MS_BIND_REC, 0):
            return folders
        placed.append(target)
    return placed


def _check_readable(places: list[str], folders: list[str]) -> None:
    for place, folder in zip(places, folders, strict=True):
        if not os.access(place, os.R_OK | os.X_OK):
            print(
                f"{folder} cannot be read by the sandbox's user {os.getuid()}; expected a folder "
                "that others may read and enter (chmod -R o+rX)",
                file=sys.stderr,
            )
            sys.exit(REFUSED)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
