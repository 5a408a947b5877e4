#!/usr/bin/env bash
# hack/bench.sh [--quick] [--output DIR] [ROW...]: measures the figures of docs/design/performance.md side by
# side in one run, prints them as one table and writes table.md and figures.json to DIR
# (target/bench). Leaves nothing else behind, also when it is interrupted.
#
# ROW       idle delta snapshot large sizes stream memory sidecar proxy extents catalog fio
#           writers month; without any, all of them
# --quick   tiny sizes and a debug build, in about a minute: a check that everything still runs. Its
#           figures mean nothing
#
# CSI_HOSTPATH_BIN  csi-driver-host-path, to be measured beside it (30 GiB more room). By default it is
#                   built from its module; where that cannot be had the table says why, and a program
#                   that does the same reads stands in
# CSI_LOOPBACK_KUBERNETES  where the tools for the row sidecar are: API server, released sidecar, … By default
#                   they are built; where they cannot be had the row says why
# TMPDIR            where the pools are made: up to 25 GB, on the disk that is to be measured
#
# Needs root, for loop devices and mounts. The full run takes up to 50 minutes and wants the machine for
# itself. The exit code says whether every row ran; whether the figures are good is for the reader.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"

profile=bench
output=
arguments=() rows=()
while (($#)); do
    case $1 in
        --quick) profile=dev arguments+=("$1") ;;
        --output) output=${2:?--output: which directory?}; shift ;;
        --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        *) rows+=("$1") ;;
    esac
    shift
done
if [[ -z $output ]]; then
    output=$(cd "$repo" && realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")/bench
fi
output=$(realpath --canonicalize-missing "$output")

is_root || die "needs root, for loop devices and mounts"
install_missing fio jq losetup mkfs.ext4 mkfs.xfs mount chattr || die "needs what could not be installed"

# The released peer. It refuses to serve unless its version is set.
host_path_version=v1.18.0
if [[ $profile != dev && -z ${CSI_HOSTPATH_BIN:-} ]]; then
    reason=$(mktemp)
    if found=$(go_command hostpathplugin github.com/kubernetes-csi/csi-driver-host-path \
        "$host_path_version" ./cmd/hostpathplugin "-X main.version=$host_path_version" 2>"$reason"); then
        export CSI_HOSTPATH_BIN=$found
    else
        CSI_HOSTPATH_MISSING=$(tail -n 1 "$reason")
        export CSI_HOSTPATH_MISSING
        echo "$CSI_HOSTPATH_MISSING" >&2
    fi
    rm -f "$reason"
fi

# Before the row needs them, so that it can be seen what takes so long. The row says why they are not there.
if [[ ${#rows[@]} == 0 || " ${rows[*]} " == *" sidecar "* ]]; then
    kubernetes_tools >/dev/null || true
fi

build=(cargo bench --locked --bench figures --no-run)
# With the features of the tests, whose build it then shares.
[[ $profile != dev ]] || build=(cargo build --locked --all-features --bench figures)
# Cargo names the binary that it has built; what it says beside that is shown.
binary=$(cd "$repo" && "${build[@]}" --message-format=json-render-diagnostics |
    jq -r 'select(.reason == "compiler-artifact" and .target.name == "figures") | .executable')
[[ -x $binary ]] || die "the bench does not build"

# Below it lies all that the run makes: so it can be told from what is others'.
tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-loopback-bench.XXXXXX")
bench_pid=

cleanup() { # cleanup STATUS: takes away what the run has made and exits with that
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM
    trap - EXIT
    set +e
    local pid
    [[ -z $bench_pid ]] || kill -KILL "$bench_pid" 2>/dev/null
    while read -r pid _; do
        kill -KILL "$pid" 2>/dev/null
    done < <(processes_of "$tmp")
    [[ -z $bench_pid ]] || wait "$bench_pid" 2>/dev/null
    clear_directory "$tmp"
    exit "$1"
}
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM

# In the background, so that a signal to this script is heard while it runs, and in a session of its
# own, so that an interrupt from the terminal reaches this script alone.
status=0
TMPDIR=$tmp setsid "$binary" --output "$output" "${arguments[@]}" "${rows[@]}" &
bench_pid=$!
wait "$bench_pid" || status=$?
bench_pid=
cleanup "$status"
