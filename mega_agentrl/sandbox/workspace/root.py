"""Finds the root file system of workspaces, and unpacks OCI images.

An image is a folder with an `oci-layout` file, or a .tar file that `skopeo` reads as an OCI or
Docker archive. It is unpacked once, with `umoci`, without root, into a folder beside it that is
named for its content's time and size, and reused by later runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import HOST_ROOT
from mega_agentrl.sandbox.process import run_command

_KEY = "tool.workspace.root"
_TIMEOUT_S = 3600.0
_TAG = "workspace"


def resolve_root(root: str) -> Path | None:
    """Return the folder of the root file system, or None for the machine's own.

    Raises:
        ConfigError: There is none, or the image cannot be unpacked.
    """
    if root == HOST_ROOT:
        return None
    path = Path(root).absolute()
    if path.is_dir() and not (path / "oci-layout").exists():
        if not any((path / name).is_file() for name in ("bin/bash", "usr/bin/bash")):
            raise ConfigError(_KEY, root, "a root file system, with /bin/bash in it")
        return path
    if path.is_dir() or (path.is_file() and path.suffix == ".tar"):
        return _unpacked_image(root, path)
    raise ConfigError(_KEY, root, "`host`, a folder, or an OCI image (a folder or a .tar file)")


def _unpacked_image(root: str, path: Path) -> Path:
    info = (path / "index.json" if path.is_dir() else path).stat()
    target = path.with_name(f"{path.name}.{info.st_mtime_ns:x}-{info.st_size:x}.unpacked")
    if not (target / "rootfs").is_dir():
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            for command in _unpack_commands(root, path, work):
                _run(root, command)
            os.rename(work / "bundle", target)
        except FileExistsError:
            pass  # another run was faster
        except OSError as error:
            if not (target / "rootfs").is_dir():
                raise ConfigError(_KEY, root, f"an image that can be unpacked ({error})") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target / "rootfs"


def _unpack_commands(root: str, path: Path, work: Path) -> list[list[str]]:
    programs = {name: shutil.which(name) for name in ("skopeo", "umoci")}
    if None in programs.values():
        missing = [name for name, found in programs.items() if found is None]
        raise ConfigError(
            _KEY,
            root,
            "the programs skopeo and umoci, which unpack an OCI image",
            f"{', '.join(missing)} not installed; install them, or unpack the image elsewhere, for "
            f"example with `docker export $(docker create IMAGE) | tar -x -C FOLDER`, and set "
            f"{_KEY}=FOLDER",
        )
    image = f"{work / 'image'}:{_TAG}"
    kind = "oci" if path.is_dir() else "docker-archive"
    if path.is_file() and not _is_docker_archive(path):
        kind = "oci-archive"
    unpack = [str(programs["umoci"]), "unpack"]
    if os.geteuid() != 0:
        unpack.append("--rootless")
    return [
        [str(programs["skopeo"]), "copy", f"{kind}:{path}", f"oci:{image}"],
        [*unpack, "--image", image, str(work / "bundle")],
    ]


def _is_docker_archive(path: Path) -> bool:
    import tarfile

    with tarfile.open(path) as archive:
        return any(member.name == "manifest.json" for member in archive)


def _run(root: str, command: list[str]) -> None:
    code, error = run_command(
        ["/usr/bin/env", f"PATH={os.defpath}", *command], timeout_s=_TIMEOUT_S
    )
    if code:
        raise ConfigError(_KEY, root, "an image that can be unpacked", f"{command[0]}: {error}")
