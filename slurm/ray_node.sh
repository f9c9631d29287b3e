#!/usr/bin/env bash
# Run Ray on one node of a job, in the foreground; started by slurm/train.sh under srun.
#
#   ray_node.sh NODE INDEX ADDRESS     index 0 is the head; address is the head's, host:port
#
# Two nodes may share a host (Slurm's virtual nodes do), and so may two jobs. Therefore the system
# chooses all ports except the head's, Ray's files are in a folder of this node and this start, and the
# script does not call `ray stop`, which would end every Ray on the host. When the script ends, for any
# reason except SIGKILL, every process that it started and the folder are gone.
#
# `ray symmetric-run` is not used, because it calls `ray stop`, refuses to start if another Ray runs on
# the host, and does not retry a node whose Ray was too slow to start.
set -uo pipefail

node=$1 index=$2 address=$3
set +u # site scripts and modules rarely support it
source "$MEGA_AGENTRL_ROOT/slurm/env.sh"
set -u
cd "$MEGA_AGENTRL_ROOT" || exit 1

# A short path: Ray's Unix sockets add about 60 characters, and their paths may have 107 bytes.
folder=${MEGA_AGENTRL_LOCAL_DIR:-${TMPDIR:-/tmp}}/ray-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$index
tag=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$node
ray_pid=''

tagged_pids() { # prints the ids of the processes of this start, which inherit the tag
    env -u MEGA_AGENTRL_NODE_TAG grep -lzsx "MEGA_AGENTRL_NODE_TAG=$tag" /proc/[0-9]*/environ |
        cut -d / -f 3
}

kill_tagged() {
    local pid
    for pid in $(tagged_pids); do kill -KILL "$pid" 2>/dev/null; done
}

clean_up() {
    local code=$?
    trap '' TERM INT HUP USR2
    if [ -n "$ray_pid" ]; then
        kill -TERM "$ray_pid" 2>/dev/null
        for _ in {1..100}; do
            kill -0 "$ray_pid" 2>/dev/null || break
            sleep 0.1
        done
    fi
    kill_tagged
    rm -rf "$folder"
    exit "$code"
}

trap clean_up EXIT
trap 'exit 143' TERM INT HUP USR2 # USR2 is how train.sh ends a node
export MEGA_AGENTRL_NODE_TAG=$tag RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_worker_niceness=0 # Ray's default is 15: every other program on the node would go first

host=${address%:*} port=${address##*:}
if [ "$index" -eq 0 ]; then
    role_options=(--head --node-ip-address="$host" --port="$port" --include-dashboard=false
        --ray-client-server-port=$((port + 1)))
else
    role_options=(--address="$address")
    # Ray itself waits only 20 s, and a head may take longer to start on a slow file system.
    until (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; do
        sleep 1 &
        wait $!
    done
fi

run_ray() { # runs Ray to its end and returns its exit code; stores the output for `has_started`
    local code=0
    mkdir -p "$folder" || exit 1
    # In a separate session, so that signals to this script do not reach Ray's processes.
    # shellcheck disable=SC2086  # the options are words
    setsid ray start --log-color=false --block "${role_options[@]}" --node-name="$node" \
        --temp-dir="$folder" --num-cpus="$SLURM_CPUS_ON_NODE" --min-worker-port=0 \
        --max-worker-port=0 --dashboard-agent-listen-port=0 --disable-usage-stats \
        ${MEGA_AGENTRL_RAY_OPTIONS:-} > >(exec env -u MEGA_AGENTRL_NODE_TAG tee "$folder/output") 2>&1 &
    ray_pid=$!
    wait "$ray_pid" || code=$?
    ray_pid=''
    return "$code"
}

has_started() { grep -qs 'Ray runtime started' "$folder/output"; }

# Ray's own start timeout of 30 s may be too short on a busy node. Once Ray has started, its end is final.
for try in 1 2 3; do
    code=0
    run_ray || code=$?
    echo "ray_node.sh: Ray on $node ended with exit code $code"
    if [ "$code" -eq 0 ] || [ "$try" -eq 3 ] || has_started; then break; fi
    echo "ray_node.sh: it did not start; try $((try + 1)) of 3"
    kill_tagged
    rm -rf "$folder"
done
exit "$code"
