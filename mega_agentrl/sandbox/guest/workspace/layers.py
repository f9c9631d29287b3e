"""The file systems of a workspace: read-only lower layers and an upper layer of its own.

Everything that a workspace writes is in one tmpfs of its own mount namespace: the upper layers of
two overlay file systems (the root, where there is one, and `/workspace`), `/tmp` and `/dev/shm`.
The size of that tmpfs is the disk limit, its pages are charged to the control group, and the kernel
frees it with the last process of the workspace, also if the trainer has crashed. So nothing is left
on a disk that anybody would have to clean.

A fork copies these folders into a tmpfs of its own, which takes about 5 ms for 10 MB and grows with
the size (`tools/bench_workspace.py`); a tmpfs has no reflinks. The alternative, a further overlay
for each side above the parent's frozen layer, would not depend on the size. It was not built: both
sides would share a mount and its disk limit, and the parent's processes in the background would
still write to the frozen layer.

The overlays are mounted in a user namespace (`userxattr`), where they keep their marks in `user.*`
attributes; a tmpfs has these since Linux 6.6.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.guest import syscalls
from mega_agentrl.sandbox.guest.interpreter import mount_terminals
from mega_agentrl.sandbox.guest.privileged_helper import copy_tree

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.settings import WorkspaceSettings

ROOT_LAYER = "/sandbox/root"
"""Folder of the sandbox with the lower layer of the root file system."""

FOLDER_LAYER = "/sandbox/folder"
"""Folder of the sandbox with the lower layer of the project folder.

It is there in the workspace too, so that a reward command can restore files from it, which the
policy can read, but not change.
"""

LAYERS = "/sandbox/layers"
NEW_ROOT = "/sandbox/new_root"
MOUNT_POINTS = (LAYERS, NEW_ROOT)
"""Empty folders that the sandbox must have."""

WORKSPACE = "/workspace"
"""Where the project folder appears, and where the shell starts."""

_WRITTEN = {"root": 0o755, "folder": 0o755, "tmp": 0o1777, "shm": 0o1777}
"""Folders of the tmpfs that a fork copies, with their modes."""

_EMPTY = "empty"
_SKELETON = "skeleton"
_SKELETON_FOLDERS = ("dev", "proc", "tmp", WORKSPACE[1:], *("sandbox", FOLDER_LAYER[1:]))


def mount_layers(settings: WorkspaceSettings, source_fd: int | None) -> int:
    """Mount the file systems of a new workspace and enter them.

    Needs all capabilities in new user, mount and PID namespaces.

    Args:
        settings: Layers and limits.
        source_fd: The layers of the workspace to copy; None for a fresh one.

    Returns:
        A descriptor of the new layers, from which a fork copies.

    Raises:
        OSError: The kernel refuses a mount, or the copy does not fit.
    """
    options = f"size={settings.disk_mib}m,nr_inodes={settings.num_inodes},mode=0700"
    syscalls.mount("tmpfs", LAYERS, syscalls.MS_NOSUID_NODEV, options)
    for name, mode in _WRITTEN.items():
        _make_folder(f"{LAYERS}/{name}", mode)
    layers_fd = os.open(LAYERS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if source_fd is not None:
        for name in _WRITTEN:
            _copy_folder(name, source_fd, layers_fd)
    root = _mount_root(has_folder=settings.has_folder) if settings.has_root else ""
    lower = FOLDER_LAYER
    if not settings.has_folder:
        lower = f"{LAYERS}/{_EMPTY}"
        _make_folder(lower, 0o755)
    _mount_overlay("folder", [lower], f"{root}{WORKSPACE}")
    if not settings.has_root:
        syscalls.bind_mount(f"{LAYERS}/tmp", "/tmp")
    syscalls.bind_mount(f"{LAYERS}/shm", f"{root}/dev/shm")
    mount_terminals(f"{root}/dev/pts")
    syscalls.mount("proc", f"{root}/proc", syscalls.MS_NOSUID_NODEV | syscalls.MS_NOEXEC)
    syscalls.unmount_lazily(LAYERS)
    if root:
        syscalls.pivot_root(root)
    return layers_fd


def _mount_root(*, has_folder: bool) -> str:
    """Mount the root file system on `NEW_ROOT`, with the devices of the sandbox."""
    skeleton = f"{LAYERS}/{_SKELETON}"
    for name in ("", *_SKELETON_FOLDERS):
        _make_folder(f"{skeleton}/{name}", 0o1777 if name == "tmp" else 0o755)
    _mount_overlay("root", [skeleton, ROOT_LAYER], NEW_ROOT)
    syscalls.bind_mount("/dev", f"{NEW_ROOT}/dev", recursive=True)
    if has_folder:
        syscalls.bind_mount(FOLDER_LAYER, f"{NEW_ROOT}{FOLDER_LAYER}")
    return NEW_ROOT


def _mount_overlay(name: str, lower_folders: list[str], target: str) -> None:
    work = f"{LAYERS}/work-{name}"
    _make_folder(work, 0o700)
    lower = ":".join(lower_folders)
    options = f"lowerdir={lower},upperdir={LAYERS}/{name},workdir={work},userxattr"
    syscalls.mount("overlay", target, syscalls.MS_NOSUID_NODEV, options)


def _make_folder(path: str, mode: int) -> None:
    os.mkdir(path)
    os.chmod(path, mode)  # mkdir applies the umask


def _copy_folder(name: str, source_fd: int, target_fd: int) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    fds = [os.open(name, flags, dir_fd=fd) for fd in (source_fd, target_fd)]
    try:
        copy_tree(*fds, is_overlay=True)
    finally:
        for fd in fds:
            os.close(fd)


def check_layers(settings: WorkspaceSettings) -> None:
    """Check in a new workspace that it can be used.

    Raises:
        OSError: An overlay cannot delete and replace a folder, or the shell is missing.
    """
    folder = Path(WORKSPACE, ".check")
    folder.mkdir()
    (folder / "file").write_bytes(b"")
    (folder / "file").unlink()
    folder.rmdir()
    os.setxattr("/tmp", "user.check", b"1")
    os.removexattr("/tmp", "user.check")
    if not os.access("/bin/bash", os.X_OK):
        raise FileNotFoundError(f"the root file system has no /bin/bash ({settings.has_root=})")
