#!/usr/bin/env bash
# hack/sanity.sh [POOL...]: runs csi-sanity against the driver, once per pool kind (reflink, image,
# copy; all of them by default) and access type (mount, block), with everything switched on that
# the driver advertises, and each time once more through the node proxy, which has an API server that
# is away. Prints a line of counts per run and fails when a spec failed, when one was skipped that is
# not listed below, when a spec ends otherwise through the proxy, or when the driver or the proxy left
# something behind.
#
# CSI_LOOPBACK_BIN names the driver to test; without it, the one of this tree is built.
# Needs root. Exits with 77 when it cannot run here; the last line of stderr says why.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"

# Specs that do not run because of what the driver is, by the reason that csi-sanity gives. A skip
# for any other reason is a failure: it would be a feature that the driver claims and nobody tests.
declare -A expected_skips=(
    # Nothing to attach: volumes are files on the node, so there is no ControllerPublishVolume.
    ["ControllerPublishVolume not supported"]=1
    ["ControllerUnpublishVolume not supported"]=1
    ["Controller Publish, UnpublishVolume not supported"]=1
)
# Specs that csi-sanity itself has switched off, by the end of their name.
expected_pending="pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted"
# The spec compares messages of Go with what they keep for themselves: the topology that it has sent holds its encoded size, the one that
# it gets does not. So it fails with each driver that reports a topology. A test of the driver asks for the same
# (volumes_and_snapshots_are_made_on_this_node_and_nowhere_else).
faulty_spec="should succeed when creating a snapshot with accessibility requirements"

GiB=$((1 << 30))
# Thin, so the size costs nothing; the pool holds many times what a run keeps at once.
volume_size=$((1 * GiB))
expanded_size=$((2 * GiB))
pool_size=$((32 * GiB))
secret=csi-sanity-secret-that-no-log-may-show

tmp=
driver_pid=
proxy_pid=
sanity_pid=

stop() { # stop PID SECONDS: asks the process to end, then makes it. Fails if it had to be made to.
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

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    # A second interrupt must not stop what undoes the first.
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
# Each trap does it by itself: an `exit` from a signal's trap could end that of the exit before its
# first command.
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM

failed_specs=0
problems=0
problem() { # problem POOL TEXT...
    problems=$((problems + 1))
    printf 'csi-sanity %s: problem: %s\n' "$1" "${*:2}"
}

# once FORMAT SPEC...: prints about a spec the first time it is named: the runs have them in common.
declare -A named=()
once() {
    [[ -z ${named[$2]:-} ]] || return 0
    named[$2]=1
    # shellcheck disable=SC2059 # the format is the caller's
    printf "$@"
}

# What the external components and kubelet add in a cluster, and a parameter of the driver itself.
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
        # This kind uses the XFS that the data directory is on; few machines have one at hand.
        truncate --size="$pool_size" "$tmp/xfs.img" &&
            mkfs.xfs -q -m reflink=1,rmapbt=0 "$tmp/xfs.img" &&
            mount -o loop "$tmp/xfs.img" "$data" || return 1
    fi
    "$driver" --mode driver --endpoint "unix://$tmp/csi.sock" --node-id sanity-node \
        --data-dir "$data" --pool "$pool" --pool-size "$pool_size" --pool-sparse >"$tmp/driver.log" 2>&1 &
    driver_pid=$!
    await_socket "$tmp/csi.sock" "$driver_pid"
}

# No pod opts in here, so the proxy has nothing to add, and needs nothing of the API server.
start_proxy() {
    printf '%s\n' 'apiVersion: v1' 'kind: Config' 'current-context: away' \
        'clusters: [{name: away, cluster: {server: "https://127.0.0.1:1"}}]' \
        'contexts: [{name: away, context: {cluster: away, user: nobody}}]' \
        'users: [{name: nobody, user: {}}]' >"$tmp/kubeconfig"
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

run_specs() { # run_specs POOL ACCESS_TYPE WAY: straight to the driver, or through the proxy
    local pool=$1 access=$2 way=$3 report=$tmp/report-$2-$3.json log=$tmp/sanity-$2-$3.log status=0
    local passed failed pending skipped spec reason socket=$tmp/csi.sock
    if [[ $way == proxy ]]; then
        socket=$tmp/proxy.sock
        access="$access, through the node proxy"
    fi
    # In the background, so that a signal to this script is heard while it runs.
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
    if ! jq -e '.[0].SpecReports | length > 0' "$report" >/dev/null 2>&1; then
        problem "$pool" "csi-sanity ($access) ended with $status and no report"
        tail -n 40 "$log"
        return
    fi
    read -r passed failed pending skipped < <(jq -r '
        [.[].SpecReports[] | select(.LeafNodeType == "It") | .State]
        | [map(select(. == "passed")), map(select(. != "passed" and . != "pending" and . != "skipped")),
           map(select(. == "pending")), map(select(. == "skipped"))]
        | map(length) | @tsv' "$report")
    printf 'csi-sanity %s (%s): %d passed, %d failed, %d pending, %d skipped\n' \
        "$pool" "$access" "$passed" "$failed" "$pending" "$skipped"

    failed_specs=$((failed_specs + failed))
    if ((failed > 0)); then
        jq -r '.[].SpecReports[] | select(.State | IN("passed", "pending", "skipped") | not)
            | "  failed: \((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" "))",
              (.Failure | "    \(.Location.FileName | split("/") | last):\(.Location.LineNumber)",
               (.Message | split("\n")[] | "    \(.)"))' "$report"
        echo "  last lines of the driver's log:"
        tail -n 40 "$tmp/driver.log" | sed 's/^/    /'
    elif ((status != 0 || passed == 0)); then
        problem "$pool" "csi-sanity ($access) ended with $status after $passed specs passed"
    fi
    while IFS=$'\t' read -r spec reason; do
        if [[ $spec == *"$faulty_spec" ]]; then
            once '  skipped: %s: it fails with each driver that reports a topology\n' "$spec"
        elif [[ -n ${expected_skips[$reason]:-} ]]; then
            once '  skipped: %s: %s\n' "$spec" "$reason"
        else
            problem "$pool" "unexpected skip ($access): $spec: ${reason:-no reason given}"
        fi
    done < <(jq -r '.[].SpecReports[] | select(.State == "skipped")
        | [((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ")), (.Failure.Message // "")] | @tsv' \
        "$report")
    while read -r spec; do
        if [[ $spec == *"$expected_pending" ]]; then
            once '  pending: %s: switched off by csi-sanity\n' "$spec"
        else
            problem "$pool" "unexpected pending spec ($access): $spec"
        fi
    done < <(jq -r '.[].SpecReports[] | select(.State == "pending")
        | (.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ")' "$report")
}

# compare POOL ACCESS_TYPE: how each spec ended through the proxy, against how it ended without it.
compare() {
    local pool=$1 access=$2 way differ same
    for way in straight proxy; do
        # The reason of a skip is part of it: a feature that seems to be missing through the proxy would show there.
        jq -r '.[].SpecReports[] | select(.LeafNodeType == "It")
            | [.State, ((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ")),
               (if .State == "skipped" then .Failure.Message else "" end)] | @tsv' \
            "$tmp/report-$access-$way.json" 2>/dev/null | sort >"$tmp/specs-$way"
    done
    differ=$(comm -3 "$tmp/specs-straight" "$tmp/specs-proxy")
    same=$(comm -12 "$tmp/specs-straight" "$tmp/specs-proxy" | wc -l)
    printf '  %s (%s): %d specs end alike with the node proxy and without it\n' "$pool" "$access" "$same"
    if [[ -n $differ || $same == 0 ]]; then
        problem "$pool" "specs ($access) that end otherwise through the node proxy: ${differ:-none was run}"
    fi
}

# The specs delete all that they create, so a driver that has ended owns no device and no mount.
check_left_over() { # check_left_over POOL
    local pool=$1 deadline=$((SECONDS + 10)) left not_ours='^$'
    # The filesystem that this script made.
    [[ $pool != reflink ]] || not_ours="^mount $tmp/data\$|^loop device .* $tmp/xfs.img\$"
    # The kernel lets go of a loop device a moment after its last user.
    while
        left=$({
            mounts_below "$tmp" | sed 's/^/mount /'
            loops_of "$tmp" | sed 's/^/loop device /'
        } | grep -vE "$not_ours" || true)
        [[ -n $left ]] && ((SECONDS < deadline))
    do
        sleep 0.2
    done
    [[ -z $left ]] || problem "$pool" "left behind: ${left//$'\n'/, }"
}

end_proxy() { # end_proxy POOL
    local pool=$1 left
    if ! kill -0 "$proxy_pid" 2>/dev/null; then
        problem "$pool" "the node proxy ended by itself"
        tail -n 40 "$tmp/proxy.log"
    elif ! stop "$proxy_pid" 20; then
        problem "$pool" "the node proxy did not end cleanly on SIGTERM"
        tail -n 40 "$tmp/proxy.log"
    fi
    proxy_pid=
    left=$(find "$tmp/proxy" -mindepth 1 -type d)
    [[ -z $left ]] || problem "$pool" "the node proxy remembers what nobody left to a runtime: $left"
    if grep -qF "$secret" "$tmp/proxy.log"; then
        problem "$pool" "a secret is in the node proxy's log"
    fi
}

run_pool() { # run_pool POOL
    local pool=$1 access
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-sanity.XXXXXX")
    write_parameters
    if start_driver "$pool"; then
        for access in mount block; do
            run_specs "$pool" "$access" straight
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
        if ! kill -0 "$driver_pid" 2>/dev/null; then
            problem "$pool" "the driver ended by itself"
            tail -n 40 "$tmp/driver.log"
        elif ! stop "$driver_pid" 20; then
            problem "$pool" "the driver did not end cleanly on SIGTERM"
            tail -n 40 "$tmp/driver.log"
        fi
        driver_pid=
        check_left_over "$pool"
        if grep -qF "$secret" "$tmp/driver.log"; then
            problem "$pool" "a secret is in the driver's log"
        fi
    else
        problem "$pool" "the driver did not start"
        tail -n 40 "$tmp/driver.log"
        [[ -z $driver_pid ]] || stop "$driver_pid" 5 || true
        driver_pid=
    fi
    clear_directory "$tmp"
    tmp=
}

cannot() {
    echo "$*" >&2
    exit 77
}

pools=("$@")
((${#pools[@]})) || pools=(reflink image copy)
for pool in "${pools[@]}"; do
    [[ $pool =~ ^(reflink|image|copy)$ ]] || die "no such pool kind: $pool (reflink, image, copy)"
done
is_root || cannot "needs root, for loop devices and mounts"
install_missing "${storage_commands[@]}" jq || cannot "needs what could not be installed"
sanity=$(go_tool csi-sanity) || exit 77
driver=${CSI_LOOPBACK_BIN:-}
if [[ -z $driver ]]; then
    (cd "$repo" && cargo build --locked --quiet) || die "the driver does not build"
    driver=$(cd "$repo" && realpath "${CARGO_TARGET_DIR:-target}")/debug/csi-loopback
fi
driver=$(realpath "$driver")

for pool in "${pools[@]}"; do
    run_pool "$pool"
done
# A failed spec counts like a problem for the exit code.
((problems + failed_specs == 0))
