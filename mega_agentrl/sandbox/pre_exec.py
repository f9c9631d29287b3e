"""A program that runs between the launcher and bubblewrap, as the launcher's user.

It joins the sandbox's cgroups, makes the interpreter's folders reachable, switches to the sandbox's
own user and executes the command. Usage: `python -I -S pre_exec.py REQUEST`, where REQUEST is a
JSON object with these keys:

* `cgroups`: files to write the process id to.
* `user`: user and group id to switch to, or null.
* `folders`: folders, files or sockets that the user must reach, although it may have no access to a
  parent, such as /root; they are bound elsewhere, in a new mount namespace.
* `owned`: for each folder, whether what belongs to its owner is to belong to the user there (an
  idmapped mount, where the file system has these).
* `command`: the command; `{0}` stands for the path of the first folder.

It exits with `EXIT_SETUP_FAILED` and a message if the user cannot read a folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any

EXIT_SETUP_FAILED = 97

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_FROM_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x00100000
# The numbers of these calls are the same on all machines.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_MS_BIND_REC = 0x1000 | 0x4000
_MS_PRIVATE_REC = (1 << 18) | 0x4000
_BIND_PARENTS = ("/mnt", "/media", "/srv")


def main(request: dict[str, Any]) -> None:
    """Set the process up as requested and execute the command; never returns."""
    for path in request["cgroups"]:
        Path(path).write_text(str(os.getpid()), encoding="ascii")
    folders = list(request["folders"])
    if request["user"] is not None:
        folders = _bind_folders(folders, request["owned"], request["user"])
        _switch_user(request["user"])
        _check_readable(folders, request["folders"])
    command = [_substitute_folder(word, folders) for word in request["command"]]
    os.execv(command[0], command)


def _switch_user(uid: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        print(
            f"root cannot switch to user {uid} ({error}); expected the capabilities CAP_SETUID and "
            "CAP_SETGID. Probable cause: a container without them; start it with them, or run as "
            "a user other than root",
            file=sys.stderr,
        )
        sys.exit(EXIT_SETUP_FAILED)


def _substitute_folder(word: str, folders: list[str]) -> str:
    if word.startswith("{") and word.endswith("}") and word[1:-1].isdigit():
        return folders[int(word[1:-1])]
    return word


def _bind_folders(folders: list[str], owned: list[bool], uid: int) -> list[str]:
    """Bind the folders where any user can reach them and return their new paths.

    Returns the old paths if this root user may not mount.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_PRIVATE_REC, None):
        return folders
    sources = [os.open(folder, os.O_PATH) for folder in folders]
    bind_folder = next((path for path in _BIND_PARENTS if Path(path).is_dir()), "/tmp")
    if libc.mount(b"tmpfs", bind_folder.encode(), b"tmpfs", 0, b"size=1m,mode=0755"):
        return folders
    bind_folders = []
    for number, source in enumerate(sources):
        target = f"{bind_folder}/{number}"
        if stat.S_ISDIR(os.fstat(source).st_mode):  # its own path may be covered by now
            Path(target).mkdir()
        else:
            Path(target).touch()
        if owned[number] and _mount_as_owner(libc, source, target, uid):
            bind_folders.append(target)
            continue
        if libc.mount(f"/proc/self/fd/{source}".encode(), target.encode(), None, _MS_BIND_REC, 0):
            return folders
        bind_folders.append(target)
    return bind_folders


def _mount_as_owner(libc: ctypes.CDLL, source: int, target: str, uid: int) -> bool:
    """Mount a folder so that what belongs to its owner belongs to `uid`.

    Returns:
        False if the kernel or the file system cannot do that.
    """
    info = os.fstat(source)
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH)
    tree = libc.syscall(_SYS_OPEN_TREE, source, b"", flags)
    if tree < 0:
        return False
    namespace = _user_namespace(libc, f"{info.st_uid} {uid} 1\n", f"{info.st_gid} {uid} 1\n")
    attributes = struct.pack("4Q", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
    size = ctypes.c_size_t(len(attributes))
    status = libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, size)
    if status == 0:
        status = libc.syscall(_SYS_MOVE_MOUNT, tree, b"", -1, target.encode(), _FROM_EMPTY_PATH)
    os.close(namespace)
    os.close(tree)
    return bool(status == 0)


def _user_namespace(libc: ctypes.CDLL, uid_map: str, gid_map: str) -> int:
    """Return a descriptor of a new user namespace with these maps."""
    ready_r, ready_w = os.pipe()
    done_r, done_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done_w)
        libc.unshare(_CLONE_NEWUSER)
        os.write(ready_w, b"x")
        os.read(done_r, 1)
        os._exit(0)
    os.read(ready_r, 1)
    for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
        Path(f"/proc/{pid}/{name}").write_text(text, encoding="ascii")
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    for fd in (ready_r, ready_w, done_r, done_w):
        os.close(fd)
    os.waitpid(pid, 0)
    return namespace


def _check_readable(bind_folders: list[str], folders: list[str]) -> None:
    for bind_folder, folder in zip(bind_folders, folders, strict=True):
        mode = os.R_OK | (os.X_OK if Path(bind_folder).is_dir() else 0)
        if not os.access(bind_folder, mode):
            print(
                f"{folder} cannot be read by the sandbox's user {os.getuid()}; expected something "
                "that others may read, and enter if it is a folder (chmod -R o+rX)",
                file=sys.stderr,
            )
            sys.exit(EXIT_SETUP_FAILED)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
