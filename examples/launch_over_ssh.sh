#!/usr/bin/env bash
# Run one training on a list of hosts: Ray on all of them over ssh, the driver on the first one.
#
#   HOSTS="node1 node2" examples/launch_over_ssh.sh experiment=... [key=value ...]
#
# Run it on the first host, in the repository's folder, which every host sees under the same path
# and where `make env` has made the environment. It ends with the driver's exit code, and then stops
# Ray on all hosts, so that no other Ray of this user may run there. USR1 and TERM are forwarded to
# the driver. For another scheduler replace `ssh` by its way of running a command on a node.
set -euo pipefail

root=$PWD
read -r -a hosts <<<"${HOSTS:?expected the names of the hosts, this one first}"
address=${hosts[0]}:${RAY_PORT:-6379}
# The token keeps others out of the cluster.
export MEGA_AGENTRL_ROOT=$root RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

ray_on() { # HOST ARGUMENT...: runs `ray` with the arguments on a host
    local host=$1
    shift
    # Through stdin, because all users of a host can read command lines.
    ssh "$host" bash -s <<END
export MEGA_AGENTRL_ROOT=${root@Q} RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$RAY_AUTH_TOKEN
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_worker_niceness=0
cd ${root@Q} && source slurm/env.sh && ray ${@@Q} </dev/null
END
}

stop_ray() {
    local host
    for host in "${hosts[@]}"; do ray_on "$host" stop || true; done
}

driver='' received=''
forward() { # SIGNAL: sends it to the driver, once there is one
    received=$1
    [ -z "$driver" ] || kill "-$1" "$driver" 2>/dev/null || true
}

trap stop_ray EXIT
trap 'forward USR1' USR1
trap 'forward TERM' TERM INT HUP
ray_on "${hosts[0]}" start --head --port="${address##*:}" --include-dashboard=false \
    --disable-usage-stats
for host in "${hosts[@]:1}"; do ray_on "$host" start --address="$address" --disable-usage-stats; done

set +u # site scripts rarely support it
source slurm/env.sh
set -u
python -m mega_agentrl "$@" "cluster.ray_address=$address" &
driver=$!
[ -z "$received" ] || forward "$received"
while
    received='' code=0
    wait "$driver" || code=$?
    [ -n "$received" ] # a trap ends `wait` before the driver has ended
do :; done
exit "$code"
