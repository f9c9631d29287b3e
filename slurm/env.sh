# shellcheck shell=bash
# Sourced by slurm/*.sh on every node, before anything else. Edit it for your site.
#
# MEGA_AGENTRL_ROOT is the repository's folder, which every node must see under the same path.

# module load cuda/13.0

# Network interface of NCCL and gloo, if a node has several. Without it NCCL chooses one, and gloo uses
# the one with the node's Ray address:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# The head node's address for Ray, if the route to the other nodes is the wrong network:
# export MEGA_AGENTRL_HEAD_ADDRESS=10.0.0.1
# Additional options of `ray start` on every node:
# export MEGA_AGENTRL_RAY_OPTIONS="--object-store-memory=50000000000"
# A fast local disk for Ray's sockets and logs, and for compiled kernels (a short path: socket paths may
# have 107 bytes):
# export MEGA_AGENTRL_LOCAL_DIR=/local

# Compiled kernels lie on each node: in a shared home, the ranks of all nodes would lock and write the same
# files. The folder is kept for the next job.
kernel_cache=${MEGA_AGENTRL_LOCAL_DIR:-${TMPDIR:-/tmp}}/mega_agentrl-kernels-$(id -u)
mkdir -p -m 700 "$kernel_cache" 2>/dev/null
[ -O "$kernel_cache" ] || kernel_cache=$(mktemp -d) # a folder that another user has made is not trusted
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$kernel_cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$kernel_cache/inductor}
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$kernel_cache/vllm}
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$kernel_cache/flashinfer}

# Container in which the nodes' programs run, and the folders that they need (docs/containers.md):
# export MEGA_AGENTRL_CONTAINER=/images/mega_agentrl.sqsh
# export MEGA_AGENTRL_CONTAINER_MOUNTS=/models:/models,/data:/data

if [ -n "${MEGA_AGENTRL_CONTAINER:-}" ]; then
    # The image has the environment, this folder the code.
    export PYTHONPATH=$MEGA_AGENTRL_ROOT PYTHONNOUSERSITE=1
else
    # Created by `make env`; another environment works as well.
    source "$MEGA_AGENTRL_ROOT/.venv/bin/activate"
fi
