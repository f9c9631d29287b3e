#!/usr/bin/env bash
#SBATCH --job-name=preflight
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=15
#
# Check every node of an allocation and the connections between them, in a few minutes.
#
#   sbatch -N8 --gpus-per-node=8 slurm/preflight.sh
#   salloc -N8 --gpus-per-node=8 bash slurm/preflight.sh
#
# Prints a table of nodes by checks: imports of the environment; equal versions of Python, torch, NCCL,
# Ray and driver; a driver that runs torch's version of CUDA; GPUs by NVML (number, model, uncorrected
# errors, Xids, NVLinks); a compiler and Python's headers, and on GPUs a compiled kernel; InfiniBand
# ports; the shared folder; free GiB of shared folder, local folder and /dev/shm; limits on open files
# and locked memory; clocks; connections between all nodes, also by gloo (the table has the interface);
# bubblewrap. `!` marks a failure, explained in a line below the table; the exit code is then 1.
set -euo pipefail

export MEGA_AGENTRL_ROOT=${MEGA_AGENTRL_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
if ! [ -f "$MEGA_AGENTRL_ROOT/slurm/env.sh" ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "slurm/preflight.sh: no job, or no slurm/env.sh in $MEGA_AGENTRL_ROOT;" \
        "expected: sbatch slurm/preflight.sh from the repository's folder" >&2
    exit 2
fi
cd "$MEGA_AGENTRL_ROOT"
set +eu # site scripts and modules rarely support these options
source slurm/env.sh
set -eu

if [ "${1:-}" = node ]; then
    exec timeout 600 python -m slurm.node_preflight node "$2" "$SLURMD_NODENAME"
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${SLURMD_NODENAME:-${nodes[0]}}
source slurm/steps.sh
export MEGA_AGENTRL_PREFLIGHT_KEY
MEGA_AGENTRL_PREFLIGHT_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
address=$(here python -m slurm.ray_cluster place "$SLURM_JOB_ID" "${nodes[@]}")
work=$(mktemp -d)
trap 'remove_containers; rm -rf "$work"' EXIT

here python -m slurm.node_preflight head "$address" "${nodes[@]}" &
head_pid=$!
until (exec 3<>"/dev/tcp/${address%:*}/${address##*:}") 2>/dev/null; do
    kill -0 "$head_pid" 2>/dev/null || break
    sleep 0.2
done
step --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --label -- \
    bash "$MEGA_AGENTRL_ROOT/slurm/preflight.sh" node "$address" >"$work/nodes.log" 2>&1 </dev/null &
srun_pid=$!
code=0
wait "$head_pid" || code=$?
if [ "$code" -ne 0 ] && [ -s "$work/nodes.log" ]; then
    echo "Output of the nodes (number: ${nodes[*]}):"
    tail -n 40 "$work/nodes.log"
fi
sleep 1
kill -TERM "$srun_pid" 2>/dev/null || true
wait "$srun_pid" 2>/dev/null || true
exit "$code"
