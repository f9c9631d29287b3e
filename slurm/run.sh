#!/usr/bin/env bash
# Become a program in the environment of slurm/env.sh; started by slurm/steps.sh.
# With MEGA_AGENTRL_PID_FILE it writes its process id there, which is the program's.
set +u # site scripts and modules rarely support it
source "$MEGA_AGENTRL_ROOT/slurm/env.sh"
cd "$MEGA_AGENTRL_ROOT" || exit 1
[ -z "${MEGA_AGENTRL_PID_FILE:-}" ] || echo $$ >"$MEGA_AGENTRL_PID_FILE"
unset MEGA_AGENTRL_PID_FILE
exec "$@"
