#!/usr/bin/env bash
# Makes .venv and installs the system packages it needs (bubblewrap, libseccomp2; on CPUs libnuma1).
# Returns at once when nothing has changed: .venv/.stamp holds the checksum of its inputs.
#
#   DEVICE=cpu|gpu      default: gpu where nvidia-smi is present
#   PYTHON=...          interpreter to use, 3.11 or 3.12
#   TORCH_INDEX_URL=... extra package index. On a CPU-only machine whose index offers only
#                       CUDA builds of torch, point it at PyTorch's own CPU wheel index.
#   WITH_TOOLS=1        also the programs that only tests need: Slurm, munge, iproute2, and Chromium for
#                       reports
#   WITH_TE=1           also Transformer Engine (GPU). WITH_APEX=1: also NVIDIA's Apex (GPU). Both are
#                       built here, in 10 to 60 minutes, which needs nvcc of the CUDA version of
#                       torch (13.0; CUDA_HOME or the path) and a C++ compiler. MAX_JOBS limits the
#                       compilers at work; without a GPU here set TORCH_CUDA_ARCH_LIST=9.0 and
#                       NVTE_CUDA_ARCHS=90 (H100). Later calls keep them, and build them again when
#                       the rest of the environment changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'set-up: %s\n' "$@" >&2
    exit 2
}

fits() { # 3.11 or 3.12, able to make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with the venv module among: ${PYTHON:-} python3.11 python3.12 python3" \
        "install one (Debian: python3 and python3-venv) or name it: make env PYTHON=/path/to/python3.11"
}

# Debian names. bubblewrap and libseccomp isolate the Python tool, vLLM's CPU build loads libnuma.
missing_system_packages() {
    local libraries
    command -v bwrap >/dev/null || echo bubblewrap
    # Not piped into grep -q: it closes the pipe early, which pipefail reads as "not found".
    libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
    [[ $libraries == *libseccomp.so.2* ]] || echo libseccomp2
    [[ $DEVICE != cpu || $libraries == *libnuma.so.1* ]] || echo libnuma1
    [ -n "${WITH_TOOLS:-}" ] || return 0
    command -v chromium >/dev/null || echo chromium
    PATH=$PATH:/usr/sbin:/sbin command -v slurmctld >/dev/null || echo slurm-wlm
    PATH=$PATH:/usr/sbin:/sbin command -v munged >/dev/null || echo munge
    PATH=$PATH:/usr/sbin:/sbin command -v ip >/dev/null || echo iproute2
}

install_system_packages() {
    local packages
    packages=$(missing_system_packages | tr '\n' ' ')
    [ -n "$packages" ] || return 0
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        as_root=(sudo -n)
        sudo -n true 2>/dev/null || fail "these system packages are missing and need root to install: $packages" \
            "ask an administrator for them, then run this again"
    fi
    command -v apt-get >/dev/null || fail "these system packages are missing and there is no apt-get here: $packages" \
        "install them with this system's package manager, then run this again"
    echo "set-up: installing system packages: $packages"
    "${as_root[@]}" apt-get update -q >/dev/null || echo "set-up: apt-get update failed; trying with the present package lists"
    # shellcheck disable=SC2086  # one word per package
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends $packages >/dev/null ||
        fail "apt-get could not install $packages; install by hand, then run this again"
    packages=$(missing_system_packages | tr '\n' ' ')
    [ -z "$packages" ] || fail "installed, but still not found: $packages"
}

pip_install() { # quiet; the whole output is in .venv/install.log
    .venv/bin/python -m pip --disable-pip-version-check install \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$@" >>.venv/install.log 2>&1 || {
        grep -v '^WARNING' .venv/install.log | tail -n 20 >&2
        fail "pip failed; its output is in $PWD/.venv/install.log"
    }
}

install_packages() {
    : >.venv/install.log
    if [ "$DEVICE" = cpu ]; then
        # Python compiles what is imported when it is imported: sooner than all of 4 GB.
        pip_install --no-deps --no-compile -r requirements/cpu.txt
        pip_install --no-deps --no-build-isolation -e .
    else
        pip_install -c requirements/gpu.txt setuptools
        pip_install --no-build-isolation -c requirements/gpu.txt -e '.[gpu,sweep,dev]'
    fi
}

make_environment() {
    local python
    if ! fits .venv/bin/python; then
        python=$(find_python)
        echo "set-up: making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
    fi
    echo "set-up: installing the $DEVICE packages (about 4 GB; 2 to 4 minutes the first time)"
    install_packages
    printf '%s\n' "$stamp" >.venv/.stamp
}

build_te() {
    pip_install -c requirements/gpu.txt ninja pybind11 wheel
    pip_install --no-build-isolation -c requirements/gpu.txt -e '.[te]'
}

build_apex() { # without the two variables Apex would leave out its kernels
    pip_install -c requirements/gpu.txt ninja wheel
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip_install --no-build-isolation -c requirements/gpu.txt \
        "apex @ git+https://github.com/NVIDIA/apex@25.09"
}

build_optional() { # build_optional NAME WANTED: .venv/.NAME holds the stamp that it was built for
    local name=$1 wanted=$2
    [ -n "$wanted" ] || { [ -e ".venv/.$name" ] && [ "$DEVICE" = gpu ]; } || return 0
    [ "$(cat ".venv/.$name" 2>/dev/null)" != "$stamp" ] || return 0
    [ "$DEVICE" = gpu ] || fail "WITH_TE and WITH_APEX need DEVICE=gpu, got DEVICE=$DEVICE"
    [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || command -v nvcc >/dev/null ||
        fail "no nvcc in CUDA_HOME, /usr/local/cuda or the path, which building $name needs" \
            "install the CUDA toolkit of torch's version (13.0), or load its module, then run this again"
    command -v c++ >/dev/null || fail "no C++ compiler (c++), which building $name needs" \
        "install one (Debian: g++), then run this again"
    echo "set-up: building $name (10 to 60 minutes; output in .venv/install.log)"
    PATH=$PWD/.venv/bin:$PATH "build_$name" # the build looks for ninja on the path
    printf '%s\n' "$stamp" >".venv/.$name"
}

if [ -z "${DEVICE:-}" ]; then
    DEVICE=cpu
    ! command -v nvidia-smi >/dev/null || DEVICE=gpu
fi
[ -f "requirements/$DEVICE.txt" ] || fail "DEVICE=$DEVICE: expected cpu or gpu"

install_system_packages
stamp="$DEVICE $(cat "requirements/$DEVICE.txt" pyproject.toml setup.py | sha256sum | cut -d ' ' -f 1) $PWD"
if [ "$(cat .venv/.stamp 2>/dev/null)" != "$stamp" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    make_environment
    echo "set-up: done"
fi
build_optional te "${WITH_TE:-}"
build_optional apex "${WITH_APEX:-}"
