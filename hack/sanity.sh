#!/usr/bin/env bash
# hack/sanity.sh [POOL...]: runs csi-sanity against the driver with all of its features, for each
# pool kind (reflink, image, copy; default: all) and access type (mount, block), directly and
# through the node proxy, whose API server is unreachable. Prints one line of counts per run. Fails
# if a spec fails or is skipped without an entry below, if its result differs through the proxy, or
# if mounts, loop devices or state of driver or proxy remain.
#
# CSI_LOOPBACK_BIN is the driver to test (default: build it). Needs root. Exits with 77 if it cannot
# run on this machine; the last line of stderr gives the reason.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/ginkgo.sh
source "$repo/hack/ginkgo.sh"
# shellcheck source=hack/sanity-specs.sh
source "$repo/hack/sanity-specs.sh"

GiB=$((1 << 30))
# Volumes are sparse. The pool is many times larger than the volumes of a run.
volume_size=$((1 * GiB))
expanded_size=$((2 * GiB))
pool_size=$((32 * GiB))
secret=csi-sanity-secret-that-no-log-may-show

tmp=
driver_pid=
proxy_pid=
sanity_pid=

stop() { # stop PID SECONDS: sends SIGTERM, and SIGKILL after SECONDS. Fails after SIGKILL or a nonzero exit.
    local pid=$1 deadline=$((SECONDS + $2)) status=0
    kill -TERM "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do
        if ((SECONDS >= deadline)); then
            kill -KILL "$pid" 2>/dev/null || true
            status=1
            break
        fi
        sleep 0.1
    done
    wait "$pid" 2>/dev/null || status=1
    return "$status"
}

cleanup() { # cleanup STATUS: stops all processes, removes all files, and exits with STATUS
    # A second interrupt must not stop the cleanup.
    trap '' INT TERM
    trap - EXIT
    set +e
    [[ -z $sanity_pid ]] || stop "$sanity_pid" 5 || true
    [[ -z $proxy_pid ]] || stop "$proxy_pid" 10 || true
    [[ -z $driver_pid ]] || stop "$driver_pid" 10 || true
    sanity_pid='' proxy_pid='' driver_pid=''
    [[ -z $tmp ]] || clear_directory "$tmp" || true
    exit "$1"
}
# Each trap calls cleanup: an `exit` in a signal trap can end the EXIT trap before its first
# command.
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM

failed_specs=0
problems=0
problem() { # problem POOL TEXT...
    problems=$((problems + 1))
    printf 'csi-sanity %s: problem: %s\n' "$1" "${*:2}"
}

# once FORMAT SPEC...: prints the line only for the first run with this spec.
declare -A named=()
once() {
    [[ -z ${named[$2]:-} ]] || return 0
    named[$2]=1
    # shellcheck disable=SC2059 # the caller gives the format
    printf "$@"
}

# Parameters that the sidecars of a cluster add, a parameter of the driver, and secrets.
write_parameters() {
    printf '%s\n' 'changeTracking: "true"' \
        'csi.storage.k8s.io/pvc/name: sanity-claim' \
        'csi.storage.k8s.io/pvc/namespace: sanity' \
        'csi.storage.k8s.io/pv/name: sanity-volume' >"$tmp/volume-parameters.yaml"
    printf '%s\n' 'changeTracking: "false"' >"$tmp/mutable-parameters.yaml"
    printf '%s\n' 'csi.storage.k8s.io/volumesnapshot/name: sanity-snapshot' \
        'csi.storage.k8s.io/volumesnapshot/namespace: sanity' >"$tmp/snapshot-parameters.yaml"
    local call
    for call in CreateVolume DeleteVolume ControllerPublishVolume ControllerUnpublishVolume \
        ControllerValidateVolumeCapabilities NodeStageVolume NodePublishVolume CreateSnapshot \
        DeleteSnapshot ControllerExpandVolume ControllerModifyVolume ListSnapshots GetSnapshot; do
        printf '%sSecret:\n  token: %s\n' "$call" "$secret"
    done >"$tmp/secrets.yaml"
}

start_driver() { # start_driver POOL
    local pool=$1 data=$tmp/data
    mkdir "$data"
    if [[ $pool == reflink ]]; then
        # This kind needs a data directory on XFS, which few machines have.
        truncate --size="$pool_size" "$tmp/xfs.img" &&
            mkfs.xfs -q -m reflink=1,rmapbt=0 "$tmp/xfs.img" &&
            mount -o loop "$tmp/xfs.img" "$data" || return 1
    fi
    "$driver" --mode driver --endpoint "unix://$tmp/csi.sock" --node-id sanity-node \
        --data-dir "$data" --pool "$pool" --pool-size "$pool_size" --pool-sparse >"$tmp/driver.log" 2>&1 &
    driver_pid=$!
    await_socket "$tmp/csi.sock" "$driver_pid"
}

# No pod opts in to deferred mounts, so the proxy does not need the API server.
start_proxy() {
    printf '%s\n' 'apiVersion: v1' 'kind: Config' 'current-context: away' \
        'clusters: [{name: away, cluster: {server: "https://127.0.0.1:1"}}]' \
        'contexts: [{name: away, context: {cluster: away, user: none}}]' \
        'users: [{name: none, user: {}}]' >"$tmp/kubeconfig"
    "$driver" --mode node-proxy --endpoint "unix://$tmp/proxy.sock" \
        --driver-endpoint "unix://$tmp/csi.sock" --node-name sanity-node \
        --kubeconfig "$tmp/kubeconfig" --state-dir "$tmp/proxy" >"$tmp/proxy.log" 2>&1 &
    proxy_pid=$!
    await_socket "$tmp/proxy.sock" "$proxy_pid"
}

await_socket() { # await_socket SOCKET PID
    local deadline=$((SECONDS + 60))
    until [[ -S $1 ]]; do
        kill -0 "$2" 2>/dev/null && ((SECONDS < deadline)) || return 1
        sleep 0.1
    done
}

run_specs() { # run_specs POOL ACCESS_TYPE PATH: PATH is direct (the driver's socket) or proxy
    local pool=$1 access=$2 path=$3 report=$tmp/report-$2-$3.json log=$tmp/sanity-$2-$3.log status=0
    local passed failed pending skipped state spec reason why socket=$tmp/csi.sock
    if [[ $path == proxy ]]; then
        socket=$tmp/proxy.sock
        access="$access, through the node proxy"
    fi
    # In the background: bash handles a signal during `wait`, but not during a foreground command.
    "$sanity" --csi.endpoint="unix://$socket" \
        --csi.mountdir="$tmp/mount" --csi.stagingdir="$tmp/staging" \
        --csi.testvolumeaccesstype="$2" \
        --csi.testvolumesize="$volume_size" --csi.testvolumeexpandsize="$expanded_size" \
        --csi.testvolumeparameters="$tmp/volume-parameters.yaml" \
        --csi.testvolumemutableparameters="$tmp/mutable-parameters.yaml" \
        --csi.testsnapshotparameters="$tmp/snapshot-parameters.yaml" \
        --csi.secrets="$tmp/secrets.yaml" \
        --ginkgo.skip="$faulty_spec" --ginkgo.v --ginkgo.no-color --ginkgo.timeout=20m --ginkgo.json-report="$report" \
        >"$log" 2>&1 &
    sanity_pid=$!
    wait "$sanity_pid" || status=$?
    sanity_pid=
    if ! report_is_complete "$report"; then
        problem "$pool" "csi-sanity ($access) exited with $status and wrote no report"
        tail -n 40 "$log"
        return
    fi
    read -r passed failed pending skipped < <(report_counts "$report")
    printf 'csi-sanity %s (%s): %d passed, %d failed, %d pending, %d skipped\n' \
        "$pool" "$access" "$passed" "$failed" "$pending" "$skipped"

    failed_specs=$((failed_specs + failed))
    if ((failed > 0)); then
        report_failures "$report"
        echo "  last lines of the driver's log:"
        tail -n 40 "$tmp/driver.log" | sed 's/^/    /'
    elif ((status != 0 || passed == 0)); then
        problem "$pool" "csi-sanity ($access) exited with $status after $passed specs passed"
    fi
    for state in skipped pending; do
        while IFS=$'\t' read -r spec reason; do
            if why=$(explanation "$state" "$spec" "$reason"); then
                once "  $state: %s: %s\n" "$spec" "$why"
            else
                problem "$pool" "unexpectedly $state ($access): $spec: ${reason:-no reason given}"
            fi
        done < <(report_specs "$report" "$state")
    done
}

# compare POOL ACCESS_TYPE: compares the result of each spec through the proxy with the direct one.
compare() {
    local pool=$1 access=$2 path differ same
    for path in direct proxy; do
        # With the reasons of skips, which would show a feature that is missing through the proxy.
        jq -r '.[].SpecReports[] | select(.LeafNodeType == "It")
            | [.State, ((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ")),
               (if .State == "skipped" then .Failure.Message else "" end)] | @tsv' \
            "$tmp/report-$access-$path.json" 2>/dev/null | sort >"$tmp/specs-$path"
    done
    differ=$(comm -3 "$tmp/specs-direct" "$tmp/specs-proxy")
    same=$(comm -12 "$tmp/specs-direct" "$tmp/specs-proxy" | wc -l)
    printf '  %s (%s): %d specs have the same result directly and through the node proxy\n' "$pool" "$access" "$same"
    if [[ -n $differ || $same == 0 ]]; then
        problem "$pool" "specs ($access) with another result through the node proxy: ${differ:-no spec ran}"
    fi
}

# Specs delete everything that they create: a stopped driver has no loop device and no mount.
check_leftovers() { # check_leftovers POOL
    local pool=$1 deadline=$((SECONDS + 10)) leftovers not_ours='^$'
    # The filesystem that this script created.
    [[ $pool != reflink ]] || not_ours="^mount $tmp/data\$|^loop device .* $tmp/xfs.img\$"
    # The kernel releases a loop device a moment after its last user.
    while
        leftovers=$({
            mounts_below "$tmp" | sed 's/^/mount /'
            loops_of "$tmp" | sed 's/^/loop device /'
        } | grep -vE "$not_ours" || true)
        [[ -n $leftovers ]] && ((SECONDS < deadline))
    do
        sleep 0.2
    done
    [[ -z $leftovers ]] || problem "$pool" "remaining mounts or loop devices: ${leftovers//$'\n'/, }"
}

end() { # end POOL PROGRAM PID LOG: stops a program, whose log must have no secret
    if ! kill -0 "$3" 2>/dev/null; then
        problem "$1" "$2 ended unexpectedly"
        tail -n 40 "$4"
    elif ! stop "$3" 20; then
        problem "$1" "$2 did not end cleanly on SIGTERM"
        tail -n 40 "$4"
    fi
    ! grep -qF "$secret" "$4" || problem "$1" "a secret is in $2's log"
}

end_proxy() { # end_proxy POOL
    local pool=$1 state
    end "$pool" "the node proxy" "$proxy_pid" "$tmp/proxy.log"
    proxy_pid=
    state=$(find "$tmp/proxy" -mindepth 1 -type d)
    [[ -z $state ]] || problem "$pool" "the node proxy stored state without a deferred volume: $state"
}

run_pool() { # run_pool POOL
    local pool=$1 access
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-sanity.XXXXXX")
    write_parameters
    if start_driver "$pool"; then
        for access in mount block; do
            run_specs "$pool" "$access" direct
        done
        if start_proxy; then
            for access in mount block; do
                run_specs "$pool" "$access" proxy
                compare "$pool" "$access"
            done
        else
            problem "$pool" "the node proxy did not start"
            tail -n 40 "$tmp/proxy.log"
        fi
        end_proxy "$pool"
        end "$pool" "the driver" "$driver_pid" "$tmp/driver.log"
        driver_pid=
        check_leftovers "$pool"
    else
        problem "$pool" "the driver did not start"
        tail -n 40 "$tmp/driver.log"
        [[ -z $driver_pid ]] || stop "$driver_pid" 5 || true
        driver_pid=
    fi
    clear_directory "$tmp"
    tmp=
}

cannot_run() { # cannot_run REASON
    echo "$*" >&2
    exit 77
}

pools=("$@")
((${#pools[@]})) || pools=(reflink image copy)
for pool in "${pools[@]}"; do
    [[ $pool =~ ^(reflink|image|copy)$ ]] || die "unknown pool kind $pool; use reflink, image or copy"
done
is_root || cannot_run "needs root, for loop devices and mounts"
install_missing "${storage_commands[@]}" jq || cannot_run "required commands are missing"
sanity=$(csi_sanity) || exit 77
driver=${CSI_LOOPBACK_BIN:-}
if [[ -z $driver ]]; then
    (cd "$repo" && cargo build --locked --quiet) || die "the build of the driver failed"
    driver=$(cd "$repo" && realpath "${CARGO_TARGET_DIR:-target}")/debug/csi-loopback
fi
driver=$(realpath "$driver")

for pool in "${pools[@]}"; do
    run_pool "$pool"
done
# Failed specs and problems set the exit code.
((problems + failed_specs == 0))
