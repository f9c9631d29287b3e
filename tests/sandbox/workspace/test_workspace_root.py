"""Root file systems: folders, and images that programs unpack."""

import io
import tarfile

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.sandbox.workspace.root import resolve_root

# Each program writes its arguments down; umoci makes what it would unpack.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
for last; do :; done
[ "$(basename "$0")" = skopeo ] || mkdir -p "$last/rootfs/bin"
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("skopeo", "umoci"):
        (folder / name).write_text(PROGRAM.format(log=tmp_path / "log"), encoding="ascii")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "log"


def image_folder(folder):
    folder.mkdir()
    (folder / "oci-layout").touch()
    (folder / "index.json").write_text("{}", encoding="ascii")
    return folder


def archive(path, name):
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


def test_the_host_or_a_folder_with_a_shell_may_be_the_root(tmp_path):
    assert resolve_root("host") is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bash").touch()
    assert resolve_root(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: image_folder(path / "image"), "oci"),
        (lambda path: archive(path / "image.tar", "manifest.json"), "docker-archive"),
        (lambda path: archive(path / "image.tar", "oci-layout"), "oci-archive"),
    ],
    ids=["folder", "docker archive", "oci archive"],
)
def test_an_image_is_unpacked_once(programs, tmp_path, make, kind):
    image = make(tmp_path)
    root = resolve_root(str(image))
    assert (root / "bin").is_dir()
    assert root.parent.parent == tmp_path
    assert f"skopeo copy {kind}:{image} oci:" in programs.read_text(encoding="ascii")
    before = programs.read_text(encoding="ascii")
    assert resolve_root(str(image)) == root
    assert programs.read_text(encoding="ascii") == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_failed_unpacking_is_an_error_and_leaves_nothing(programs, tmp_path):
    image = image_folder(tmp_path / "image")
    (tmp_path / "programs/umoci").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    with pytest.raises(ConfigError) as caught:
        resolve_root(str(image))
    assert "broken" in caught.value.cause
    assert {path.name for path in tmp_path.iterdir()} == {"image", "programs", "log"}


@pytest.mark.parametrize("name", ["image", "nothing", "empty"])
def test_a_path_that_cannot_be_a_root_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PATH", str(tmp_path))  # without the programs
    image_folder(tmp_path / "image")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        resolve_root(str(tmp_path / name))
    assert caught.value.key == "tool.workspace.root"
    assert ("skopeo" in caught.value.cause) == (name == "image")
