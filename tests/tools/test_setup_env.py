"""`tools/setup_env.sh` with a Python whose pip and uv only write down how they are called."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """\
#!/bin/bash
case "$*" in
    *"-m venv"*) echo "$*" >venv_options && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"pip config list"*) echo "global.index-url='https://mirror/simple'" ;;
    *"-m pip"*) all="$*" && echo "pip ${all##*install }" >>calls ;;
    *"-m uv"*)
        env >uv_env
        all="$*" && echo "CUDA_EXT=$APEX_CUDA_EXT ${all##*.venv/bin/python }" >>calls ;;
    --version) echo "Python 3.12.9" ;;
    "-c ") ;;
    -c*) [[ " $* " == *" VERSION "* ]] ;;
esac
"""
GPU = (
    "CUDA_EXT= --no-build-isolation --excludes .venv/excludes.txt -c requirements/gpu.txt "
    "-e .[gpu,sweep,dev]"
)


def write_program(path, text="#!/bin/bash\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def write_python(path, version):
    write_program(path, FAKE_PYTHON.replace("VERSION", version))


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script and its inputs, and a path with fake programs."""
    for name in ("tools/setup_env.sh", "requirements", "pyproject.toml", "setup.py"):
        target = tmp_path / "root" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    script = tmp_path / "root/tools/setup_env.sh"
    text = script.read_text()
    for place in ("/usr/local/bin/", "/opt/"):  # this machine may have a Python there
        assert place in text
        text = text.replace(f" {place}", f" {tmp_path}{place}")
    script.write_text(text)
    programs = tmp_path / "programs"
    write_python(programs / "python3", "3.12")
    write_program(programs / "ldconfig", "#!/bin/bash\necho libseccomp.so.2 libnuma.so.1\n")
    for name in ("bwrap", "nvcc", "c++"):
        write_program(programs / name)
    return tmp_path / "root"


def system_path(checkout):
    """Return a path with the fake programs and some of this machine's, but no other Python."""
    folder = checkout.parent / "system"
    folder.mkdir(exist_ok=True)
    for name in (
        "bash",
        "cat",
        "cut",
        "env",
        "id",
        "tr",
        "grep",
        "sed",
        "tail",
        "sha256sum",
        "dirname",
        "mkdir",
        "cp",
    ):
        if not (folder / name).exists():
            (folder / name).symlink_to(shutil.which(name))
    return f"{checkout.parent / 'programs'}:{folder}"


def set_up(checkout, **variables):
    """Run the script; return its exit code, its errors and the calls of pip and uv."""
    code, errors, _ = run_script(checkout, **variables)
    return code, errors, (checkout / "calls").read_text().splitlines()


def run_script(checkout, **variables):
    """Run the script; return its exit code, its errors and its output."""
    (checkout / "calls").write_text("")
    programs = checkout.parent / "programs"
    completed = subprocess.run(
        ["bash", "tools/setup_env.sh"],
        cwd=checkout,
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(checkout.parent / "home"),
            "CUDA_HOME": "/no/toolkit",
            "DEVICE": "gpu",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return completed.returncode, completed.stderr, completed.stdout


def test_gpu_environment_has_neither_transformer_engine_nor_apex_by_default(checkout):
    code, errors, calls = set_up(checkout)
    assert code == 0, errors
    assert calls == [
        "pip -c requirements/gpu.txt uv",
        "CUDA_EXT= -c requirements/gpu.txt setuptools",
        GPU,
    ]
    assert (checkout / ".venv/excludes.txt").read_text().split() == []
    assert set_up(checkout) == (0, "", [])


def test_cpu_environment_takes_what_torch_needs_and_nothing_beside_the_lock(checkout):
    code, errors, calls = set_up(checkout, DEVICE="cpu", TORCH_INDEX_URL="https://torch/cpu")
    assert code == 0, errors
    assert calls == [
        "pip -c requirements/cpu.txt uv",
        "CUDA_EXT= -c requirements/cpu.txt torch",
        "CUDA_EXT= --no-deps -r requirements/cpu.txt",
        "CUDA_EXT= --no-deps --no-build-isolation -e .",
    ]
    variables = (checkout / "uv_env").read_text().splitlines()
    assert "UV_DEFAULT_INDEX=https://mirror/simple" in variables, "pip's setting holds for uv"
    assert "UV_INDEX= https://torch/cpu" in variables


@pytest.mark.parametrize(
    ("place", "version"),
    [
        ("home/.pyenv/versions/3.12.9/bin/python", "3.12"),
        ("home/.local/share/uv/python/cpython-3.13.1-linux/bin/python3", "3.13"),
        ("usr/local/bin/python3.12", "3.12"),
        ("opt/python/3.13.0/bin/python3.13", "3.13"),
    ],
    ids=["pyenv", "uv", "usr-local", "opt"],
)
def test_interpreter_is_found_beside_an_older_one_and_a_failing_shim(checkout, place, version):
    programs = checkout.parent / "programs"
    write_python(programs / "python3", "3.11")
    write_program(programs / "python3.12", "#!/bin/bash\nexit 127\n")
    write_program(programs / "python3.13", "#!/bin/bash\nexit 127\n")
    write_python(checkout.parent / place, version)
    code, errors, output = run_script(checkout, PATH=system_path(checkout))
    assert code == 0, errors
    assert str(checkout.parent / place) in output
    assert (checkout / ".venv/bin/python").is_file()


def test_no_fitting_interpreter_says_what_to_install(checkout):
    write_python(checkout.parent / "programs/python3", "3.11")
    code, errors, _ = run_script(checkout, PATH=system_path(checkout))
    assert code == 2
    assert "apt-get install python3-venv" in errors and len(errors.splitlines()) == 1
    code, errors, _ = run_script(checkout, PYTHON="python3", PATH=system_path(checkout))
    assert (code, "PYTHON=python3: expected 3.12 3.13" in errors) == (2, True)


def test_image_keeps_its_torch(checkout):
    code, errors, calls = set_up(checkout, KEEP_TORCH="1")
    assert code == 0, errors
    assert GPU in calls
    excluded = (checkout / ".venv/excludes.txt").read_text().split()
    assert {"torch", "triton"} <= set(excluded)
    assert "--system-site-packages" in (checkout / "venv_options").read_text()


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
    assert te in calls[calls.index(GPU) :] and apex in calls[calls.index(GPU) :]


@pytest.mark.extended
@pytest.mark.parametrize(("program", "cause"), [("nvcc", "no nvcc"), ("c++", "no C++ compiler")])
def test_missing_toolkit_or_compiler_is_named(checkout, program, cause):
    (checkout.parent / "programs" / program).unlink()
    # c++ may be installed here: this machine's programs, without it.
    path = system_path(checkout)
    code, errors, calls = set_up(checkout, WITH_APEX="1", PATH=path)
    assert code == 2
    assert cause in errors
    assert not any("apex" in call for call in calls)


@pytest.mark.extended
def test_kernels_for_gpus_are_refused_in_a_cpu_environment(checkout):
    code, errors, _ = set_up(checkout, WITH_TE="1", DEVICE="cpu")
    assert code == 2
    assert "DEVICE=gpu" in errors
