#!/usr/bin/env bash
#SBATCH --job-name=mega_agentrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#
# One training run on an allocation: Ray over all its nodes, the driver on the first one.
#
#   sbatch -N8 --gpus-per-node=8 [partition, account, time] slurm/train.sh experiment=... [key=value ...]
#   sbatch --array=1-3 slurm/train.sh experiment=... 'seed=${oc.env:SLURM_ARRAY_TASK_ID}' \
#       'run_dir=runs/mine-${oc.env:SLURM_ARRAY_TASK_ID}'
#
# Submit from the repository's folder (or set MEGA_AGENTRL_ROOT). Sweeps (-m) are submitted by
# Hydra's own launcher instead, see the README.
#
# Logs: slurm-<jobid>/ beside the run's folder: driver.log, ray-<node>.log.
# Exit code: the driver's, 130 or 143 where it was asked to end. 69 where a node did not come or went away; one line names it.
# USR1, which comes 120 s before the time limit (--signal=B:USR1@600 for more), goes to the driver,
# which saves and exits with 75; then the job is put back into the queue. The driver exits with 75 as
# well where it lost a process and a checkpoint is there to go on from; so often and not more:
# MEGA_AGENTRL_MAX_LOST. So
#   scancel --batch --signal=USR1 <jobid>    saves and requeues
#   scancel --batch --signal=TERM <jobid>    lets the driver end in order
#   scancel <jobid>                          ends everything at once
#
# Read from the environment, besides what slurm/env.sh names:
#   MEGA_AGENTRL_START_DEADLINE_S   seconds for all nodes to join (300)
#   MEGA_AGENTRL_STOP_DEADLINE_S    seconds for the driver to end, then for Ray on the nodes (30)
#   MEGA_AGENTRL_MAX_LOST           how often a job starts again after a lost process (10)
#   MEGA_AGENTRL_DRIVER             the driver's command (python -m mega_agentrl), for tests. It gets
#                                   the overrides and cluster.address=<head>; with the overrides and
#                                   `--cfg job --package run_dir` it prints the run's folder.
set -euo pipefail

readonly FAILED=1 LOST=69 REQUEUE=75 BAD_INPUT=2

say() { printf 'slurm/train.sh: %s\n' "$*" >&2; }

fail() { # CODE MESSAGE
    say "$2"
    exit "$1"
}

alive() { kill -0 "$1" 2>/dev/null; }

pause() { # a second; a signal's trap runs at once and not after it
    sleep 1 &
    wait $! || true
}

# What runs: process ids of this shell's children.
declare -A ray_pid=()
driver_pid='' members_pid='' work='' asked=''

on_usr1() {
    asked=USR1
    if [ -n "$driver_pid" ]; then
        say "USR1: the driver saves and ends"
        kill -USR1 "$driver_pid" 2>/dev/null || true
    fi
}

on_term() {
    asked=TERM
    say "TERM: the driver is asked to end"
    [ -z "$driver_pid" ] || kill -TERM "$driver_pid" 2>/dev/null || true
}

stop() { # SIGNAL DEADLINE_S PID...: the signal, then KILL
    local signal=$1 deadline=$((SECONDS + $2)) pid left
    shift 2
    for pid in "$@"; do kill "-$signal" "$pid" 2>/dev/null || true; done
    while [ "$SECONDS" -lt "$deadline" ]; do
        left=''
        for pid in "$@"; do ! alive "$pid" || left=yes; done
        [ -n "$left" ] || return 0
        pause
    done
    for pid in "$@"; do kill -KILL "$pid" 2>/dev/null || true; done
}

tear_down() {
    local code=$?
    trap - EXIT
    trap '' USR1 TERM INT HUP
    [ -z "$driver_pid" ] || stop TERM "${MEGA_AGENTRL_STOP_DEADLINE_S:-30}" "$driver_pid"
    [ -z "$members_pid" ] || stop TERM 5 "$members_pid"
    # srun passes USR2 on; at TERM it would kill ray_node.sh before that could clean up.
    [ "${#ray_pid[@]}" -eq 0 ] || stop USR2 "${MEGA_AGENTRL_STOP_DEADLINE_S:-30}" "${ray_pid[@]}"
    [ -z "$work" ] || rm -rf "$work"
    [ "$code" -ne "$REQUEUE" ] || requeue
    exit "$code"
}

requeue() {
    if scontrol requeue "$SLURM_JOB_ID"; then
        say "job $SLURM_JOB_ID goes back into the queue and continues from its last checkpoint"
    else
        say "job $SLURM_JOB_ID could not be requeued (JobRequeue=0, or submitted with --no-requeue?);" \
            "submit it again to continue from its last checkpoint"
    fi
}

start_ray() { # NODE INDEX: one step, whose end means that the node has left
    srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap --mem=0 --cpu-bind=none --job-name="ray-$1" \
        bash "$MEGA_AGENTRL_ROOT/slurm/ray_node.sh" "$1" "$2" "$address" \
        </dev/null >>"$log_dir/ray-$1.log" 2>&1 &
    ray_pid[$1]=$!
}

lost_node() { # says which node has left, if any; returns 1 where none has
    local node
    for node in "${!ray_pid[@]}"; do
        alive "${ray_pid[$node]}" && continue
        say "node $node went away: Ray ended on it. Last lines of $log_dir/ray-$node.log:"
        tail -n 5 "$log_dir/ray-$node.log" | sed 's/^/    /' >&2
        return 0
    done
    # It has said why it ended.
    ! alive "$members_pid"
}

wait_for_nodes() {
    while [ ! -e "$work/joined" ]; do
        [ -z "$asked" ] || return 0
        ! lost_node || exit "$LOST"
        pause
    done
}

count_lost() { # a start that ended by itself with $REQUEUE; beyond the limit it stays ended
    local limit=${MEGA_AGENTRL_MAX_LOST:-10} file=$log_dir/lost
    echo "start ${SLURM_RESTART_COUNT:-0}" >>"$file"
    [ "$(wc -l <"$file")" -le "$limit" ] ||
        fail "$FAILED" "the driver lost a process and could go on, but this job began again $limit times for that already; the same command goes on from the last checkpoint"
}

finish() { # the driver has ended: its code, unless a lost node is the reason
    local code=0 deadline=$((SECONDS + 4))
    wait "$driver_pid" || code=$?
    # Python had not even begun to listen: there was nothing to save yet.
    [ "$asked" != USR1 ] || [ "$code" -ne $((128 + $(kill -l USR1))) ] || code=$REQUEUE
    driver_pid=''
    case $code in
        0 | "$BAD_INPUT" | "$REQUEUE") ;;
        *)
            while [ -z "$asked" ] && [ "$SECONDS" -lt "$deadline" ]; do
                ! lost_node || exit "$LOST"
                pause
            done
            ;;
    esac
    say "the driver ended with exit code $code"
    [ "$code" -ne "$REQUEUE" ] || [ -n "$asked" ] || count_lost
    exit "$code"
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "$BAD_INPUT" "no Slurm job here; expected: sbatch slurm/train.sh ..."
export MEGA_AGENTRL_ROOT=${MEGA_AGENTRL_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[ -f "$MEGA_AGENTRL_ROOT/slurm/env.sh" ] ||
    fail "$BAD_INPUT" "no slurm/env.sh in $MEGA_AGENTRL_ROOT; submit from the repository's folder, or set MEGA_AGENTRL_ROOT"
for argument in "$@"; do
    case $argument in
        -m | --multirun) fail "$BAD_INPUT" "$argument: one run a job; submit a sweep with python -m mega_agentrl -m hydra/launcher=submitit_slurm ..." ;;
    esac
done
cd "$MEGA_AGENTRL_ROOT"
set +eu # site scripts and modules are rarely written for these
source slurm/env.sh
set -eu
command -v python >/dev/null || fail "$BAD_INPUT" "no python after slurm/env.sh; make the environment with: make env"

trap on_usr1 USR1
trap on_term TERM INT HUP
read -r -a driver <<<"${MEGA_AGENTRL_DRIVER:-python -m mega_agentrl}"
run_dir=$("${driver[@]}" "$@" --cfg job --package run_dir) || exit "$BAD_INPUT"
run_dir=${run_dir##*$'\n'}
log_dir=$(dirname "$run_dir")/slurm-$SLURM_JOB_ID
mkdir -p "$log_dir"
work=$(mktemp -d)
trap tear_down EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${SLURMD_NODENAME:-${nodes[0]}}
export MEGA_AGENTRL_HEAD=$head
# Only this job's processes may join its cluster.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
address=$(python -m slurm.ray_members place "$SLURM_JOB_ID" "${nodes[@]}")
say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: ${#nodes[@]} nodes (${nodes[*]}), head $head at $address, logs in $log_dir"

start_ray "$head" 0
index=0
for node in "${nodes[@]}"; do
    [ "$node" = "$head" ] && continue
    index=$((index + 1))
    start_ray "$node" "$index"
done
python -m slurm.ray_members watch "$address" "$work/joined" "${MEGA_AGENTRL_START_DEADLINE_S:-300}" "${nodes[@]}" &
members_pid=$!
wait_for_nodes
case $asked in
    USR1) exit "$REQUEUE" ;; # nothing has been done that could be saved
    TERM) exit 143 ;;
esac

"${driver[@]}" "$@" "cluster.address=$address" > >(tee -a "$log_dir/driver.log") 2>&1 &
driver_pid=$!
# A signal that came while the driver was being started has not reached it.
[ -z "$asked" ] || kill "-$asked" "$driver_pid" 2>/dev/null || true
while alive "$driver_pid"; do
    ! lost_node || exit "$LOST"
    pause
done
finish
