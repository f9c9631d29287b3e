# shellcheck shell=bash disable=SC2034,SC2154 # the script that sources this file uses and sets these
# Sourced by train.sh and preflight.sh after env.sh: how a program is started on a node.
#
# A program runs in the environment of env.sh, or in a container if MEGA_AGENTRL_CONTAINER names an
# image: NAME.sif for Apptainer, otherwise what pyxis takes as `srun --container-image` (NAME.sqsh, or
# REGISTRY#IMAGE:TAG). A container has the repository and the folder of Ray's files under their own
# paths, and the folders in MEGA_AGENTRL_CONTAINER_MOUNTS (SOURCE:TARGET,...).
#
# The functions replace the shell, so that its process id is the program's: call them with & or in $().
# `head` is the node of `here`.

in_container=() # arguments of srun between its options and the command
local_dir=${MEGA_AGENTRL_LOCAL_DIR:-${TMPDIR:-/tmp}}

step() { # step SRUN_OPTION... -- COMMAND...: runs a program on other nodes
    local options=()
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    exec srun --overlap --mem=0 --cpu-bind=none "${options[@]}" "${in_container[@]}" "${@:2}"
}

here() { # here COMMAND...: runs a program on the head node, which is this one unless with salloc
    [ -n "${MEGA_AGENTRL_CONTAINER:-}" ] || exec "$@"
    step --nodes=1 --ntasks=1 --nodelist="$head" --job-name=driver -- \
        bash "$MEGA_AGENTRL_ROOT/slurm/run.sh" "$@"
}

remove_containers() { # on all nodes; pyxis itself does it only if its container_scope is `job`
    [[ ${in_container[*]} == *--container-name* ]] || return 0
    timeout 60 srun --overlap --mem=0 --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        enroot remove --force "pyxis_mega_agentrl-$SLURM_JOB_ID" >/dev/null 2>&1 </dev/null || true
}

use_container() {
    local image=$MEGA_AGENTRL_CONTAINER missing='' apptainer
    local mounts=$MEGA_AGENTRL_ROOT:$MEGA_AGENTRL_ROOT,$local_dir:$local_dir
    mounts+=${MEGA_AGENTRL_CONTAINER_MOUNTS:+,$MEGA_AGENTRL_CONTAINER_MOUNTS}
    export MEGA_AGENTRL_CONTAINER
    [[ $image != /* ]] || [ -e "$image" ] || missing="no such file"
    if [[ $image == *.sif ]]; then
        apptainer=$(command -v apptainer || command -v singularity) || missing="Apptainer is not installed"
        in_container=("$apptainer" exec ${SLURM_GPUS_ON_NODE:+--nv} --bind "$mounts" "$image")
    else
        [[ $(srun --help 2>&1) == *--container-image* ]] || missing="srun has no --container-image: Slurm's plugin pyxis is not installed"
        # The name lets the steps on a node share one unpacked image.
        in_container=(--container-image="$image" --container-name="mega_agentrl-$SLURM_JOB_ID"
            --container-mounts="$mounts" --container-writable --no-container-remap-root)
    fi
    [ -z "$missing" ] || {
        echo "slurm/steps.sh: MEGA_AGENTRL_CONTAINER=$image: $missing" >&2
        exit 2
    }
}

[ -z "${MEGA_AGENTRL_CONTAINER:-}" ] || use_container
