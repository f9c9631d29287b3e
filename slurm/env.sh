# Sourced by slurm/*.sh on every node, before anything else. Edit it for your site.
#
# MEGA_AGENTRL_ROOT is the repository's folder, which every node must see under the same path.

# module load cuda/13.0

# What NCCL and gloo should talk over, where a node has several networks:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# The head node's address for Ray, where the route to the other nodes is not the right one:
# export MEGA_AGENTRL_HEAD_ADDRESS=10.0.0.1
# More options of `ray start`, for every node:
# export MEGA_AGENTRL_RAY_OPTIONS="--object-store-memory=50000000000"
# A fast local disk for Ray's sockets and logs (a short path: sockets below it have 107 bytes):
# export MEGA_AGENTRL_LOCAL_DIR=/local

# `make env` made it; an environment of your own works as well.
source "$MEGA_AGENTRL_ROOT/.venv/bin/activate"
