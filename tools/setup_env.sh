#!/usr/bin/env bash
# Makes .venv and installs the system packages it needs (bubblewrap, libseccomp2; on CPUs libnuma1).
# Returns at once when nothing has changed: .venv/.stamp holds the checksum of its inputs.
#
#   DEVICE=cpu|gpu      default: gpu where nvidia-smi is present
#   PYTHON=...          interpreter to use, 3.12 or 3.13. By default the first 3.12, else 3.13, on the
#                       path or installed by pyenv or uv, in /usr/local or in /opt
#   TORCH_INDEX_URL=... further package index. PyPI has only the CUDA build of torch, 4 GB with the
#                       packages it needs. It works on CPUs; PyTorch's own index of CPU wheels has a
#                       small build of the same version.
#   KEEP_TORCH=1        in NVIDIA's PyTorch image (GPU): .venv sees the image's packages, and its torch,
#                       Triton, Transformer Engine and Apex, which fit each other, stay in use
#   WITH_TOOLS=1        also the programs that only tests need: Slurm, munge, iproute2, and Chromium for
#                       reports
#   WITH_TE=1           also Transformer Engine (GPU). WITH_APEX=1: also NVIDIA's Apex (GPU). Both are
#                       built here, in 10 to 60 minutes, which needs nvcc of the CUDA version of
#                       torch (13.0; CUDA_HOME or the path) and a C++ compiler. MAX_JOBS limits the
#                       compilers at work; without a GPU here set TORCH_CUDA_ARCH_LIST=9.0 and
#                       NVTE_CUDA_ARCHS=90 (H100). Later calls keep them, and build them again when
#                       the rest of the environment changes.
set -euo pipefail
VERSIONS=(3.12 3.13) # of Python; all tests run on the first
OF_IMAGE=(torch torchvision torchaudio torchcodec torch-c-dlpack-ext triton) # what KEEP_TORCH=1 keeps
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'set-up: %s\n' "$@" >&2
    exit 2
}

fits() { # fits PYTHON VERSION...: of one of these versions, with the parts that some builds leave out
    "$1" -c 'import sys, venv, ensurepip, sqlite3, ssl; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' \
        "${@:2}" >/dev/null 2>&1
}

find_python() { # prints the interpreter to use
    local version candidate
    local pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    local uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" "${VERSIONS[@]}" || fail "PYTHON=$PYTHON: expected ${VERSIONS[*]} with the modules venv, sqlite3 and ssl"
        command -v "$PYTHON"
        return
    fi
    for version in "${VERSIONS[@]}"; do
        # pyenv's python3.12 on the path fails unless that version is selected: look into its folders.
        for candidate in "python$version" python3 "$pyenv/$version".*/bin/python \
            "$uv/cpython-$version".*/bin/python3 /usr/local/bin/"python$version" \
            /opt/{,*/}*/bin/"python$version"; do
            ! fits "$candidate" "$version" || { command -v "$candidate" && return; }
        done
    done
    fail "no Python ${VERSIONS[*]} with the modules venv, sqlite3 and ssl on the path, in pyenv, uv, /usr/local or /opt: install one (apt-get install python3-venv on Debian 13 or Ubuntu 24.04, else pyenv install 3.12 or uv python install 3.12), or name it: make env PYTHON=/path/to/python3.12"
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

logged() { # logged COMMAND...: quiet; the whole output is in .venv/install.log
    "$@" >>.venv/install.log 2>&1 || {
        grep -v '^WARNING' .venv/install.log | tail -n 20 >&2
        fail "the installation failed; its output is in $PWD/.venv/install.log"
    }
}

pip_setting() { # pip_setting NAME: from pip's files or variables, which uv does not read
    .venv/bin/python -m pip config list | sed -n "s/\\\\n/ /g; s/^[a-z:]*\.$1='\(.*\)'$/\1/p" | tail -n 1
}

install() {
    logged .venv/bin/python -m uv pip install --python .venv/bin/python "$@"
}

get_uv() {
    local index certificates
    : >.venv/install.log
    logged .venv/bin/python -m pip --disable-pip-version-check install -c "requirements/$DEVICE.txt" uv
    index=$(pip_setting index-url)
    [ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    export UV_INDEX="${UV_INDEX:-$(pip_setting extra-index-url)} ${TORCH_INDEX_URL:-}"
    certificates=$(pip_setting cert)
    [ -z "$certificates" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates}
    export UV_INDEX_STRATEGY=unsafe-best-match # all indexes count, as for pip
    # In all processes at once, and not by the first run, in which Ray's servers would start too late.
    export UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1}
}

install_packages() {
    if [ "$DEVICE" = cpu ]; then
        # With dependencies, which only the CUDA build has: NVIDIA's packages.
        install -c requirements/cpu.txt torch
        install --no-deps -r requirements/cpu.txt
        install --no-deps --no-build-isolation -e .
    else
        printf '%s\n' ${KEEP_TORCH:+"${OF_IMAGE[@]}"} >.venv/excludes.txt
        install -c requirements/gpu.txt setuptools
        install --no-build-isolation --excludes .venv/excludes.txt -c requirements/gpu.txt -e '.[gpu,sweep,dev]'
    fi
}

make_environment() {
    local python
    if ! fits .venv/bin/python "${VERSIONS[@]}"; then
        python=$(find_python)
        echo "set-up: making .venv with $("$python" --version), $python"
        "$python" -m venv --clear ${KEEP_TORCH:+--system-site-packages} .venv
    fi
    echo "set-up: installing the $DEVICE packages (about 7 GB; 2 to 4 minutes the first time)"
    get_uv
    install_packages
    printf '%s\n' "$stamp" >.venv/.stamp
}

build_te() {
    install -c requirements/gpu.txt ninja pybind11 wheel
    install --no-build-isolation -c requirements/gpu.txt -e '.[te]'
}

build_apex() { # without the two variables Apex would leave out its kernels
    install -c requirements/gpu.txt ninja wheel
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 install --no-build-isolation -c requirements/gpu.txt \
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
[ "$DEVICE" = gpu ] || KEEP_TORCH=
[ -f "requirements/$DEVICE.txt" ] || fail "DEVICE=$DEVICE: expected cpu or gpu"

install_system_packages
stamp="$DEVICE $(cat "requirements/$DEVICE.txt" pyproject.toml setup.py | sha256sum | cut -d ' ' -f 1) $PWD"
if [ "$(cat .venv/.stamp 2>/dev/null)" != "$stamp" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    make_environment
    echo "set-up: done"
fi
build_optional te "${WITH_TE:-}"
build_optional apex "${WITH_APEX:-}"
