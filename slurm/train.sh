#!/usr/bin/env bash
#SBATCH --job-name=mega_agentrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#
# Run one training on an allocation: Ray on all nodes, the driver on the first one.
#
#   sbatch -N8 --gpus-per-node=8 [partition, account, time] slurm/train.sh experiment=... [key=value ...]
#   sbatch --array=1-3 slurm/train.sh experiment=... 'seed=${oc.env:SLURM_ARRAY_TASK_ID}' \
#       'run_dir=runs/mine-${oc.env:SLURM_ARRAY_TASK_ID}'
#
# Submit from the repository's folder (or set MEGA_AGENTRL_ROOT). The README shows how to submit sweeps
# (-m) with Hydra's own launcher instead.
#
# Logs: driver.log and ray-<node>.log in slurm-<jobid>/, beside the run's folder.
#
# Exit code: the driver's (130 or 143 if it was interrupted), or 69 if a node did not join or was
# lost; one line of output names the node.
#
# Slurm sends USR1 120 s before the time limit (--signal=B:USR1@600 for more time). The script
# forwards it to the driver, which saves a checkpoint and exits with 75, and requeues the job. The
# driver also exits with 75 if it lost a process and can resume from a checkpoint; such restarts are
# limited by MEGA_AGENTRL_MAX_LOST.
#
#   scancel --batch --signal=USR1 <jobid>    save and requeue
#   scancel --batch --signal=TERM <jobid>    end the driver cleanly
#   scancel <jobid>                          end everything at once
#
# Environment variables, in addition to those in slurm/env.sh:
#   MEGA_AGENTRL_START_DEADLINE_S   seconds for all nodes to join (300)
#   MEGA_AGENTRL_STOP_DEADLINE_S    seconds for the driver to end, then for Ray on the nodes (30)
#   MEGA_AGENTRL_MAX_LOST           maximum number of restarts after a lost process (10)
#   MEGA_AGENTRL_DRIVER             command of the driver (python -m mega_agentrl), for tests. It is
#                                   called with the overrides and cluster.ray_address=<head>, and once
#                                   before with the overrides and `--cfg job --package run_dir`, when
#                                   it prints the run's folder.
set -euo pipefail

readonly FAILED=1 LOST=69 REQUEUE=75 BAD_INPUT=2

say() { printf 'slurm/train.sh: %s\n' "$*" >&2; }

fail() { # CODE MESSAGE
    say "$2"
    exit "$1"
}

alive() { kill -0 "$1" 2>/dev/null; }

pause() { # sleeps a second; unlike `sleep 1`, lets the trap of a signal run at once
    sleep 1 &
    wait $! || true
}

# Process ids of this shell's children.
declare -A ray_pid=()
driver_pid='' watcher_pid='' work_dir='' received_signal=''

signal_driver() { # SIGNAL: to the driver only; srun would send it to every process of the step
    local pid=$driver_pid
    if [ -n "${MEGA_AGENTRL_CONTAINER:-}" ]; then
        until [ -s "$work_dir/driver" ] || ! alive "$driver_pid"; do sleep 0.2; done
        pid=$(cat "$work_dir/driver" 2>/dev/null) || return 0
    fi
    kill "-$1" "$pid" 2>/dev/null || true
}

on_usr1() {
    received_signal=USR1
    if [ -n "$driver_pid" ]; then
        say "USR1: the driver saves and ends"
        signal_driver USR1
    fi
}

on_term() {
    received_signal=TERM
    say "TERM: the driver is asked to end"
    [ -z "$driver_pid" ] || signal_driver TERM
}

stop() { # SIGNAL TIMEOUT_S PID...: sends the signal, then KILL to those still alive
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
    if [ -n "$driver_pid" ]; then
        signal_driver TERM
        stop 0 "${MEGA_AGENTRL_STOP_DEADLINE_S:-30}" "$driver_pid"
    fi
    [ -z "$watcher_pid" ] || stop TERM 5 "$watcher_pid"
    # srun forwards USR2; on TERM it would kill ray_node.sh before that can clean up.
    [ "${#ray_pid[@]}" -eq 0 ] || stop USR2 "${MEGA_AGENTRL_STOP_DEADLINE_S:-30}" "${ray_pid[@]}"
    remove_containers
    [ -z "$work_dir" ] || rm -rf "$work_dir"
    [ "$code" -ne "$REQUEUE" ] || requeue
    exit "$code"
}

requeue() {
    if scontrol requeue "$SLURM_JOB_ID"; then
        say "job $SLURM_JOB_ID is requeued and resumes from its last checkpoint"
    else
        say "job $SLURM_JOB_ID could not be requeued (JobRequeue=0, or submitted with --no-requeue?);" \
            "submit it again to resume from its last checkpoint"
    fi
}

start_ray() { # NODE INDEX: starts a Slurm step; its end means that the node is lost
    step --nodes=1 --ntasks=1 --nodelist="$1" --job-name="ray-$1" -- \
        bash "$MEGA_AGENTRL_ROOT/slurm/ray_node.sh" "$1" "$2" "$address" \
        </dev/null >>"$log_dir/ray-$1.log" 2>&1 &
    ray_pid[$1]=$!
}

lost_node() { # reports a lost node; returns 1 if there is none
    local node
    for node in "${!ray_pid[@]}"; do
        alive "${ray_pid[$node]}" && continue
        say "node $node went away: Ray ended on it. Last lines of $log_dir/ray-$node.log:"
        tail -n 5 "$log_dir/ray-$node.log" | sed 's/^/    /' >&2
        return 0
    done
    # The watcher has already reported why it ended.
    ! alive "$watcher_pid"
}

wait_for_nodes() {
    while [ ! -e "$work_dir/joined" ]; do
        [ -z "$received_signal" ] || return 0
        ! lost_node || exit "$LOST"
        pause
    done
}

count_lost() { # counts ends with $REQUEUE that no signal caused; fails beyond the limit
    local limit=${MEGA_AGENTRL_MAX_LOST:-10} file=$log_dir/lost
    echo "start ${SLURM_RESTART_COUNT:-0}" >>"$file"
    [ "$(wc -l <"$file")" -le "$limit" ] ||
        fail "$FAILED" "the driver lost a process and could resume, but this job has already restarted $limit times for that reason; the same command resumes from the last checkpoint"
}

finish() { # exits with the ended driver's code, unless a lost node was the cause
    local code=0 deadline=$((SECONDS + 4))
    wait "$driver_pid" || code=$?
    # USR1 killed Python before it had a handler: there was nothing to save yet.
    [ "$received_signal" != USR1 ] || [ "$code" -ne $((128 + $(kill -l USR1))) ] || code=$REQUEUE
    driver_pid=''
    case $code in
        0 | "$BAD_INPUT" | "$REQUEUE") ;;
        *)
            while [ -z "$received_signal" ] && [ "$SECONDS" -lt "$deadline" ]; do
                ! lost_node || exit "$LOST"
                pause
            done
            ;;
    esac
    say "the driver ended with exit code $code"
    [ "$code" -ne "$REQUEUE" ] || [ -n "$received_signal" ] || count_lost
    exit "$code"
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "$BAD_INPUT" "no Slurm job here; expected: sbatch slurm/train.sh ..."
export MEGA_AGENTRL_ROOT=${MEGA_AGENTRL_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[ -f "$MEGA_AGENTRL_ROOT/slurm/env.sh" ] ||
    fail "$BAD_INPUT" "no slurm/env.sh in $MEGA_AGENTRL_ROOT; submit from the repository's folder, or set MEGA_AGENTRL_ROOT"
for argument in "$@"; do
    case $argument in
        -m | --multirun) fail "$BAD_INPUT" "$argument: expected one run per job; submit a sweep with python -m mega_agentrl -m hydra/launcher=submitit_slurm ..." ;;
    esac
done
cd "$MEGA_AGENTRL_ROOT"
set +eu # site scripts and modules rarely support these options
source slurm/env.sh
set -eu
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${SLURMD_NODENAME:-${nodes[0]}}
export MEGA_AGENTRL_HEAD=$head
source slurm/steps.sh
[ -n "${MEGA_AGENTRL_CONTAINER:-}" ] || command -v python >/dev/null || fail "$BAD_INPUT" "no python after slurm/env.sh; make the environment with: make env"

trap on_usr1 USR1
trap on_term TERM INT HUP
read -r -a driver <<<"${MEGA_AGENTRL_DRIVER:-python -m mega_agentrl}"
run_dir=$(here "${driver[@]}" "$@" --cfg job --package run_dir) || exit "$BAD_INPUT"
run_dir=${run_dir##*$'\n'}
log_dir=$(dirname "$run_dir")/slurm-$SLURM_JOB_ID
mkdir -p -m 700 "$log_dir" # as the folder of the run
mkdir -p "$local_dir"
work_dir=$(mktemp -d -p "$local_dir")
trap tear_down EXIT

# The token keeps processes of other jobs out of this cluster.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
address=$(here python -m slurm.ray_cluster place "$SLURM_JOB_ID" "${nodes[@]}")
say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: ${#nodes[@]} nodes (${nodes[*]}), head $head at $address, logs in $log_dir${MEGA_AGENTRL_CONTAINER:+, in $MEGA_AGENTRL_CONTAINER}"

start_ray "$head" 0
index=0
for node in "${nodes[@]}"; do
    [ "$node" = "$head" ] && continue
    index=$((index + 1))
    start_ray "$node" "$index"
done
here python -m slurm.ray_cluster watch "$address" "$work_dir/joined" "${MEGA_AGENTRL_START_DEADLINE_S:-300}" "${nodes[@]}" &
watcher_pid=$!
wait_for_nodes
case $received_signal in
    USR1) exit "$REQUEUE" ;; # there is nothing to save yet
    TERM) exit 143 ;;
esac

MEGA_AGENTRL_PID_FILE=$work_dir/driver here "${driver[@]}" "$@" "cluster.ray_address=$address" > >(tee -a "$log_dir/driver.log") 2>&1 &
driver_pid=$!
# Forward a signal that arrived while the driver was being started.
[ "$received_signal" != USR1 ] || on_usr1
[ "$received_signal" != TERM ] || on_term
while alive "$driver_pid"; do
    ! lost_node || exit "$LOST"
    pause
done
finish
