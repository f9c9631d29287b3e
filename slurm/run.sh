#!/usr/bin/env bash
# Run a program in the environment of slurm/env.sh, on a node, in the foreground; started by srun.
#
# USR1 and TERM reach the program. USR2 reaches it as TERM: on TERM srun would kill the step at once.
set -uo pipefail

set +u # site scripts and modules rarely support it
source "$MEGA_AGENTRL_ROOT/slurm/env.sh"
set -u
cd "$MEGA_AGENTRL_ROOT" || exit 1

setsid "$@" & # Slurm signals the group of a step's first process: in another one it gets each once
pid=$!
trap 'kill -USR1 "$pid"' USR1
trap 'kill -TERM "$pid"' TERM USR2
while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done # a trap ends `wait`
wait "$pid"
