#!/usr/bin/env bash
# hack/e2e.sh COMMAND: a Kubernetes cluster of one node on this machine, in which every pod of deploy/ runs.
#
#   up                starts the cluster: etcd, API server, controller manager, scheduler, kubelet, kube-proxy,
#                     containerd, CoreDNS and snapshot-controller; builds what is missing
#   run [NAME...]     runs scenarios, by default all; "all" adds the suites, which take longer: those of Kubernetes and
#                     Velero. Starts the cluster if there is none, and then ends it too
#   list              prints the scenarios and suites
#   kubectl ...       runs kubectl against the cluster
#   node COMMAND...   runs a command on the node, by default a shell
#   down              ends the cluster: no process, mount, loop device, cgroup or file remains
#
# The cluster has separate PID, mount and network namespaces, and keeps its files in one directory. Images are built
# here, under the names that the manifests use; nothing is pulled. node-driver-registrar and livenessprobe are stand-ins,
# since their modules cannot be downloaded. NetworkPolicies are stored, but nothing enforces them.
#
# CSI_LOOPBACK_E2E_DIR   the directory (/var/tmp/csi-loopback-e2e)
# CSI_LOOPBACK_BIN       a csi-loopback for the image, instead of building the static release binary
# CSI_LOOPBACK_RELEASE   a directory of hack/release.sh, for its image and its chart instead of those of this tree
#
# Needs root. Exits with 77 when the machine lacks what the cluster needs; the last line of stderr gives the reason.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/e2e/cluster.sh
source "$repo/hack/e2e/cluster.sh"

# files KIND...: the scripts of hack/e2e/KIND, by number, which is the order in which they run.
files() {
    local kind file
    for kind; do
        for file in "$repo/hack/e2e/$kind"/[0-9]*.sh; do printf '%s\t%s\n' "${file##*/}" "$file"; done
    done | sort | cut -f 2
}

# title FILE: what its second line says.
title() { sed -nE 's/^# (Scenario|Suite): //p' "$1"; }

# titles: each scenario and suite with its title.
titles() {
    local file
    for file in $(files scenarios suites); do
        printf '%-12s %s\n' "$(scenario_name "$file")" "$(title "$file")"
    done
}

# scenario_name FILE: 20-backup.sh is "backup".
scenario_name() {
    local name=${1##*/}
    name=${name#*-}
    printf '%s\n' "${name%.sh}"
}

run_scenarios() { # run_scenarios [NAME...]
    local file name started status passed=0 failed=() kinds=(scenarios suites) wanted=("$@") found=()
    if ((${#wanted[@]} == 0)); then
        kinds=(scenarios)
    elif [[ ${wanted[*]} == all ]]; then
        wanted=()
    fi
    rm -f "$e2e/counts"
    for file in $(files "${kinds[@]}"); do
        name=$(scenario_name "$file")
        ((${#wanted[@]} == 0)) || [[ " ${wanted[*]} " == *" $name "* ]] || continue
        found+=("$name")
        printf '\n=== %s: %s\n' "$name" "$(title "$file")"
        started=$SECONDS status=0
        bash "$file" || status=$?
        if ((status == 0)); then
            passed=$((passed + 1))
            printf '=== %s: passed in %d s\n' "$name" $((SECONDS - started))
        else
            failed+=("$name")
            printf '=== %s: FAILED after %d s\n' "$name" $((SECONDS - started))
            report_failure "$name"
        fi
    done
    for name in "${wanted[@]}"; do
        [[ " ${found[*]} " == *" $name "* ]] || die "$name: no such scenario; next: hack/e2e.sh list"
    done
    printf '\n'
    [[ ! -e $e2e/counts ]] || cat "$e2e/counts"
    printf '%d passed, %d failed%s\n' "$passed" "${#failed[@]}" "${failed:+: ${failed[*]}}"
    ((${#failed[@]} == 0))
}

command=${1:-}
(($# == 0)) || shift
case $command in
up) cluster_up ;;
down) cluster_down ;;
run)
    if ! cluster_runs; then
        trap 'cluster_down' EXIT
        cluster_up
    fi
    run_scenarios "$@"
    ;;
list) titles ;;
kubectl) kubectl "$@" ;;
node)
    (($#)) || set -- bash
    on_node "$@"
    ;;
-h | --help) usage ;;
*) usage >&2 && exit 1 ;;
esac
