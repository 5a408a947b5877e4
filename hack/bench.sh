#!/usr/bin/env bash
# hack/bench.sh [--quick] [--output DIR] [ROW...]: measures the figures of
# docs/design/performance.md and of peers in one run, prints them as a table, and writes table.md
# and figures.json to DIR (target/bench). All other files are removed, also when the run is
# interrupted.
#
# ROW       idle delta snapshot large sizes stream memory sidecar abuse scale pods proxy extents catalog
#           fio writers volumes databases month changes backup repository (all)
# --quick   tiny sizes and a debug build, in about a minute: checks that every row runs. The figures are
#           not meaningful
#
# CSI_HOSTPATH_BIN  path of csi-driver-host-path, the peer (needs 30 GiB more space). By default it is built
#                   from its module. If that fails, the table gives the reason, and a stand-in does the
#                   same reads
# CSI_LOOPBACK_S3   path of gofakes3, an S3 server for the row repository. By default it is built. If that
#                   fails, the row gives the reason
# CSI_LOOPBACK_KUBERNETES  directory of the tools for the rows sidecar, abuse, scale and pods: API server, released
#                   sidecar, … By default they are built. If that fails, the row gives the reason
# PostgreSQL        measured by the row databases if it is installed (Debian: postgresql)
# TMPDIR            directory of the pools: up to 35 GB, on the disk to measure
#
# Needs root, for loop devices and mounts. The full run takes up to 90 minutes on an otherwise idle
# machine. Exits with 0 if every row ran; the figures do not change the exit code.
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
        --help | -h) usage; exit ;;
        *) rows+=("$1") ;;
    esac
    shift
done
if [[ -z $output ]]; then
    output=$(cd "$repo" && realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")/bench
fi
output=$(realpath --canonicalize-missing "$output")

is_root || die "needs root, for loop devices and mounts"
install_missing fio jq losetup mkfs.ext4 mkfs.xfs mount chattr || die "required commands are missing"

# For the rows backup and databases, which report if a program is missing.
install_missing "${bench_commands[@]}" || true

# The released peer. It exits at the start if its version is not set.
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

if [[ -z ${CSI_LOOPBACK_S3:-} ]] && found=$(go_tool gofakes3); then
    export CSI_LOOPBACK_S3=$found
fi

# Built here, so that the progress is visible. The row reports a failure.
if [[ ${#rows[@]} == 0 || " ${rows[*]} " =~ " "(sidecar|abuse|scale|pods)" " ]]; then
    kubernetes_tools >/dev/null || true
fi

build=(cargo bench --locked --bench figures --no-run)
# With the features of the tests, to share their build.
[[ $profile != dev ]] || build=(cargo build --locked --all-features --bench figures)
# Cargo prints the path of the binary as JSON on stdout, and its messages on stderr.
binary=$(cd "$repo" && "${build[@]}" --message-format=json-render-diagnostics |
    jq -r 'select(.reason == "compiler-artifact" and .target.name == "figures") | .executable')
[[ -x $binary ]] || die "the build of the benchmarks failed"

# All files of the run are below this directory, which identifies them for the cleanup.
template=/tmp/csi-loopback-bench.XXXXXX
# Short below TMPDIR, such as that of hack/test.sh: the path of a socket has at most 107 bytes.
[[ -z ${TMPDIR:-} ]] || template=$TMPDIR/b.XXXX
tmp=$(mktemp -d "$template")
# PostgreSQL does not run as root, and its files are on a volume mounted below.
chmod 0711 "$tmp"
bench_pid=

cleanup() { # cleanup STATUS: removes everything that the run created, and exits with STATUS
    # A second interrupt must not stop the cleanup.
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

# In the background: bash handles a signal during `wait`, but not during a foreground command. In
# its own session: an interrupt from the terminal reaches only this script.
status=0
TMPDIR=$tmp setsid "$binary" --output "$output" "${arguments[@]}" "${rows[@]}" &
bench_pid=$!
wait "$bench_pid" || status=$?
bench_pid=
cleanup "$status"
