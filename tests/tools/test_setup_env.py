"""`tools/setup_env.sh` with a Python and a pip that only write down how they are called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """\
#!/bin/bash
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"-m pip"*) all="$*" && echo "CUDA_EXT=$APEX_CUDA_EXT ${all#*install }" >>calls ;;
    --version) echo "Python 3.12.9" ;;
esac
"""


def write_program(path, text="#!/bin/bash\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script and its inputs, and a path with fake programs."""
    for name in ("tools/setup_env.sh", "requirements", "pyproject.toml", "setup.py"):
        target = tmp_path / "root" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    programs = tmp_path / "programs"
    write_program(programs / "python", FAKE_PYTHON)
    write_program(programs / "ldconfig", "#!/bin/bash\necho libseccomp.so.2 libnuma.so.1\n")
    for name in ("bwrap", "nvcc", "c++"):
        write_program(programs / name)
    return tmp_path / "root"


def set_up(checkout, **variables):
    """Run the script; return its exit code, its errors and the arguments of `pip install`."""
    calls = checkout / "calls"
    calls.write_text("")
    programs = checkout.parent / "programs"
    completed = subprocess.run(
        ["bash", "tools/setup_env.sh"],
        cwd=checkout,
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "PYTHON": str(programs / "python"),
            "HOME": os.environ.get("HOME", "/"),
            "CUDA_HOME": "/no/toolkit",
            "DEVICE": "gpu",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return completed.returncode, completed.stderr, calls.read_text().splitlines()


def test_gpu_environment_has_neither_transformer_engine_nor_apex_by_default(checkout):
    code, errors, calls = set_up(checkout)
    assert code == 0, errors
    assert calls == [
        "CUDA_EXT= -c requirements/gpu.txt setuptools",
        "CUDA_EXT= --no-build-isolation -c requirements/gpu.txt -e .[gpu,sweep,dev]",
    ]
    assert set_up(checkout) == (0, "", [])


@pytest.mark.extended
def test_transformer_engine_and_apex_are_built_once_after_the_rest(checkout):
    assert set_up(checkout)[0] == 0
    code, errors, calls = set_up(checkout, WITH_TE="1", WITH_APEX="1")
    assert code == 0, errors
    te = "CUDA_EXT= --no-build-isolation -c requirements/gpu.txt -e .[te]"
    (apex,) = [call for call in calls if "NVIDIA/apex@" in call]
    assert apex.startswith("CUDA_EXT=1 --no-build-isolation -c requirements/gpu.txt ")
    assert calls.index(te) < calls.index(apex)
    assert set_up(checkout) == (0, "", [])
    # Another lock means another torch, against which both have to be built again.
    with (checkout / "requirements" / "gpu.txt").open("a") as lock:
        lock.write("# changed\n")
    calls = set_up(checkout)[2]
    assert "-e .[gpu,sweep,dev]" in calls[1]
    assert te in calls[2:] and apex in calls[2:]


@pytest.mark.extended
@pytest.mark.parametrize(("program", "cause"), [("nvcc", "no nvcc"), ("c++", "no C++ compiler")])
def test_missing_toolkit_or_compiler_is_named(checkout, program, cause):
    (checkout.parent / "programs" / program).unlink()
    # c++ may be installed here: this machine's programs, without it.
    path = checkout.parent / "system"
    path.mkdir()
    for name in ("bash", "cat", "cut", "tr", "grep", "tail", "sha256sum", "dirname", "mkdir", "cp"):
        (path / name).symlink_to(shutil.which(name))
    path = f"{checkout.parent / 'programs'}:{path}"
    code, errors, calls = set_up(checkout, WITH_APEX="1", PATH=path)
    assert code == 2
    assert cause in errors
    assert not any("apex" in call for call in calls)


@pytest.mark.extended
def test_kernels_for_gpus_are_refused_in_a_cpu_environment(checkout):
    code, errors, _ = set_up(checkout, WITH_TE="1", DEVICE="cpu")
    assert code == 2
    assert "DEVICE=gpu" in errors
