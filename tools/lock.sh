#!/usr/bin/env bash
# Resolve requirements/*.txt for pyproject.toml, from metadata: nothing is installed.
#   tools/lock.sh [PYTHON [FOLDER]]     PYTHON 3.12 or 3.13, FOLDER with the locks (requirements)
# Pins that still fit stay as they are; UPGRADE=1 moves all. Run it from the root of the repository.
set -euo pipefail

python=${1:-3.12} folder=${2:-requirements}
export UV_CUSTOM_COMPILE_COMMAND=tools/lock.sh

lock() { # lock DEVICE OPTION...
    .venv/bin/uv pip compile -q pyproject.toml --extra "$1" --extra sweep --extra dev \
        --python-version "$python" --python-platform x86_64-manylinux_2_28 --no-annotate \
        ${UPGRADE:+--upgrade} "${@:2}" -o "$folder/$1.txt"
}

lock gpu
# Both devices have the same version of each package.
lock cpu -c "$folder/gpu.txt" --override requirements/cpu_changes.txt
