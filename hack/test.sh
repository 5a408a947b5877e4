#!/usr/bin/env bash
# hack/test.sh [--full] [PATTERN...]: installs missing tools, then runs the checks and tests of this
# tree.
#
#   (no argument)  default tier: format, lints, unit tests and the core tests of every promise; 8 minutes
#   --full         full tier: every test at full size, csi-sanity on every pool kind, every demo scene, a cluster
#                  with every pod, small runs of the benchmarks, licenses; 50 minutes. CI runs this tier
#   PATTERN...     tests of both tiers and steps whose names contain a pattern, at full size. The name of a
#                  test binary (driver, storage, crash, api_server, ...) selects all of its tests
#
# Prints one line per step, the time and budget of each phase, the time of each lane, the slowest tests,
# and as the last line "N passed, N failed, N skipped". Exits with 1 if a test failed. A test that cannot run on
# this machine (no root, no Go) is skipped, and its line gives the reason; with CI=true it is a
# failure. The logs are in target/test-logs.
#
# TEST_TIMEOUT  timeout of a step in seconds (3600)
# TEST_LANES    3: run tests of storage, of the driver, and with an API server in parallel; 1: in sequence (3)
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/steps.sh
source "$repo/hack/steps.sh"
cd "$repo"

tier=default
patterns=()
for argument; do
    case $argument in
        --full) tier=full ;;
        -h | --help) usage && exit ;;
        -*) die "unknown option $argument; see --help" ;;
        *) patterns+=("$argument") ;;
    esac
done
# Tests that run only in the full tier are marked #[ignore = "full tier"]. These variables set the
# sizes of others.
if ((${#patterns[@]})); then
    tier=selected
elif [[ $tier == default ]]; then
    export ORACLE_CASES=2 POWER_LOSS_IMAGES=6 FILESYSTEMS_SECONDS=1 CRASH_SAMPLE=30 FUZZ_INPUTS=8000
fi

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
# Budgets are in seconds on two cores: after an earlier build (warm), or in a fresh clone without a
# cache (cold).
start=warm
[[ -d $cache/tools/$(kubernetes_key) && -d $target/debug/deps ]] || start=cold
if_cold() { if [[ $start == cold ]]; then echo "$1"; else echo "$2"; fi; }
if_full() { if [[ $tier == full ]]; then echo "$1"; else echo "$2"; fi; }

rm -rf "$target/test-logs"
begin "${TEST_TIMEOUT:-3600}" "$target/test-logs"

# Set when a test or step matches the patterns.
matched=
# is_selected NAME: whether the patterns select the step.
is_selected() {
    local pattern
    ((${#patterns[@]})) || return 0
    for pattern in "${patterns[@]}"; do
        [[ $1 != *"$pattern"* ]] || return 0
    done
    return 1
}

# check NAME COMMAND...: runs a step if it is selected.
check() {
    is_selected "$1" || return 0
    matched=1
    step "$@"
}

# --- Tools ------------------------------------------------------------------------------------------

phase tools "$(if_cold 90 20)"
command -v cargo >/dev/null || die "cargo is not in PATH; install Rust"
install_missing gcc jq || die "gcc and jq are required"
why_no_root_tests=
if ! is_root; then
    why_no_root_tests="needs root, for loop devices and mounts"
elif ! install_missing "${storage_commands[@]}"; then
    why_no_root_tests="filesystem tools are missing and could not be installed"
else
    # Tests that need a missing command skip themselves.
    install_missing "${load_commands[@]}" || true
    install_missing "${node_commands[@]}" || true
    install_missing crun || true
    # Lanes must not install packages at the same time.
    [[ $tier != full ]] || install_missing "${e2e_commands[@]}" "${bench_commands[@]}" || true
fi
install_missing shellcheck || true
# In parallel to cargo, and the tools that only lanes need in parallel to the first tests: none of them
# keeps two cores busy.
go_tools() {
    # shellcheck disable=SC2016 # $1 is for the inner shell
    run_detached "Kubernetes tools" bash -euc 'source "$1"; kubernetes_tools' _ "$repo/hack/lib.sh"
    # shellcheck disable=SC2016
    [[ $tier != full ]] || run_detached "tools of scenes" \
        nice bash -euc 'source "$1"; csi_sanity; go_tool gofakes3; e2e_tools' _ "$repo/hack/lib.sh"
}
[[ -n $why_no_root_tests ]] || run_in_background go_tools

# --- Format ------------------------------------------------------------------------------------------

phase format 10
if ! cargo_component rustfmt fmt; then
    skip 1 "cargo fmt" "rustfmt is missing and could not be installed"
else
    check "cargo fmt" cargo fmt --all --check
    check "cargo fmt, fuzz targets" cargo fmt --check --manifest-path fuzz/Cargo.toml
fi

# --- Build ------------------------------------------------------------------------------------------

phase build "$(if_cold 660 180)"
# The shipped binary has no fail points. It is built first, because the test build replaces it in
# the target directory. The default tier has one build: its demo scenes run the test binary.
program=
if [[ $tier != default ]]; then
    step "build the shipped binary" cargo build --locked --bin csi-loopback
    if ((status == 0)); then
        program=$target/shipped/csi-loopback
        mkdir -p "${program%/*}"
        cp "$target/debug/csi-loopback" "$program"
        # shellcheck disable=SC2016 # $1 is for the inner shell
        check "the shipped binary has no fail points" bash -c '! grep --text --fixed-strings fail-points "$1"' _ "$program"
    fi
fi
# This script runs the test binaries itself, without cargo, to control lanes and measure each test.
build_tests() { # build_tests NAME
    # shellcheck disable=SC2016 # $1 is for the inner shell
    step "$1" bash -c 'cargo test --workspace --all-features --locked --no-run \
        --message-format=json-render-diagnostics >"$1" &&
        cargo build --bench figures --all-features --locked' _ "$logs/artifacts.json"
}
# Clippy is a compiler with more lints: the build of the tests lints the workspace. `cargo clippy`
# would compile all dependencies once more.
status=1
if cargo_component clippy clippy; then
    RUSTC_WORKSPACE_WRAPPER=$(rustc --print sysroot)/bin/clippy-driver
    [[ -x $RUSTC_WORKSPACE_WRAPPER ]] || RUSTC_WORKSPACE_WRAPPER=$(command -v clippy-driver)
    CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
    export RUSTC_WORKSPACE_WRAPPER CLIPPY_ARGS
    build_tests "build tests with clippy"
    ((status == 0)) || unset RUSTC_WORKSPACE_WRAPPER CLIPPY_ARGS
else
    skip 1 "clippy" "clippy is missing and could not be installed"
fi
((status == 0)) || build_tests "build tests"
((status == 0)) || finish
[[ $tier != default ]] || program=$target/debug/csi-loopback
declare -A binary_of=()
# Libraries of the workspace with unit tests.
units=()
while IFS=$'\t' read -r kind name path; do
    binary_of[$name]=$path
    [[ $kind == test ]] || units+=("$name")
done < <(jq -r 'select(.reason == "compiler-artifact" and .profile.test and .executable != null
        and (.target.kind[0] == "test" or .target.kind[0] == "lib"))
    | [.target.kind[0], .target.name, .executable] | @tsv' "$logs/artifacts.json")

# --- Kubernetes tools -------------------------------------------------------------------------------

# Tests that need these programs skip themselves without them.
phase "Kubernetes tools" "$(if_cold 120 5)"
if [[ -n $why_no_root_tests ]]; then
    skip 1 "Kubernetes tools" "$why_no_root_tests"
else
    collect "Kubernetes tools"
    if ((status == 0)); then
        CSI_LOOPBACK_KUBERNETES=$(tail -n 1 "$log")
        export CSI_LOOPBACK_KUBERNETES
        print_result "Kubernetes tools" ""
        passed=$((passed + 1))
    else
        skip 1 "Kubernetes tools" "$(tail -n 1 "$log")"
    fi
fi

# --- Tests ------------------------------------------------------------------------------------------

phase "tests and scenes" "$(if_full 2700 480)"
arguments=(--show-output)
[[ $tier == default ]] || arguments+=(--include-ignored)
# Variables of the test harness only, not of cargo, which would build dependencies again. Cargo sets the
# first for tests; the second is for the times of tests, a feature of nightly compilers.
harness=(env CARGO_MANIFEST_DIR="$repo")
if RUSTC_BOOTSTRAP=1 "${binary_of[no_root]}" --list -Z unstable-options --report-time >/dev/null 2>&1; then
    harness+=(RUSTC_BOOTSTRAP=1)
    arguments+=(-Z unstable-options --report-time)
fi

# filter NAME: prints the patterns that select tests of a binary; none if a pattern is the binary's
# name.
filter() {
    local pattern
    for pattern in "${patterns[@]}"; do
        [[ $pattern != "$1" ]] || return 0
    done
    ((${#patterns[@]} == 0)) || printf '%s\n' "${patterns[@]}"
}

# tests NAME [ARGUMENT...]: runs the selected tests of a binary. Tests that need root run one at a time:
# they share the loop devices, and some measure time.
tests() {
    local name=$1 binary=${binary_of[${1%%[ ,]*}]} filters count
    shift
    mapfile -t filters < <(filter "$name")
    count=$("$binary" --list --format terse "${filters[@]}" "$@" 2>/dev/null | grep -c ': test$' || true)
    if ((count == 0)); then
        # A name that no longer exists must not pass as a test. A library may have no tests that need root.
        [[ ${#patterns[@]} != 0 || " ${units[*]} " == *" ${name%%[ ,]*} "* ]] || fail 1 "$name: no test matches"
        return 0
    fi
    matched=1
    if [[ -n $why_no_root_tests && " $* " != *" --skip root_ "* && $name != no_root ]]; then
        skip "$count" "$name, $count tests" "$why_no_root_tests"
    else
        run_tests "$name" "${harness[@]}" "$binary" "${arguments[@]}" "${filters[@]}" "$@"
    fi
}

root_tests() { # root_tests NAME...: runs binaries whose tests need root
    local name
    for name; do tests "$name" --test-threads=1; done
}

# The proofs again, smaller, with the largest block size.
large_blocks() {
    local large=65536
    if ! printf '6.12\n%s\n' "$(uname -r)" | sort -VC; then
        skip 1 "image pools with blocks of 64 KiB" "needs Linux 6.12 or later, not $(uname -r)"
        return
    fi
    POOL_BLOCK_SIZE=$large ORACLE_CASES=4 POWER_LOSS_IMAGES=16 tests "storage with blocks of 64 KiB" --test-threads=1 --exact \
        oracle::an_image_pool_never_misses_a_changed_block \
        power_loss::an_image_pool_keeps_acknowledged_data_after_power_loss
    POOL_BLOCK_SIZE=$large CRASH_ONLY=snapshot CRASH_SAMPLE=4 tests "crash with blocks of 64 KiB" \
        --test-threads=1 a_call_converges_after_a_kill_at_any_point
}

# Lints of scripts, and licenses. Advisories are not checked: their database comes from the network and
# changes without a commit.
lints() {
    local scripts
    if ! command -v shellcheck >/dev/null; then
        skip 1 "shellcheck" "shellcheck is missing and could not be installed"
    else
        mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
        check "shellcheck" shellcheck --external-sources "${scripts[@]}"
    fi
    if [[ $tier != default ]]; then
        # shellcheck disable=SC2016 # $1 is for the inner shell
        check "hack/actions.sh" bash -euc 'source "$1"; go_tool actionlint >/dev/null || exit 77
            hack/actions.sh' _ "$repo/hack/lib.sh"
    fi
    if [[ $tier == full ]] || { [[ $tier == selected ]] && is_selected "cargo deny"; }; then
        # shellcheck disable=SC2016 # $1 is for the inner shell
        check "cargo deny" bash -euc 'source "$1"; deny=$(cargo_deny) || exit 77
            "$deny" --locked check bans licenses sources' _ "$repo/hack/lib.sh"
    fi
}

# --- Scenes of the demo, csi-sanity, the bench ------------------------------------------------------

# interrupted SCENE SECONDS: interrupts a scene, which must then report a clean state, as at its
# end.
interrupted() {
    local output
    output=$(timeout --signal=INT --kill-after=100 "$2" hack/demo.sh "$1" 2>&1) || true
    printf '%s\n' "$output"
    grep -q 'no mount, loop device, process or file is left' <<<"$output"
}
export -f interrupted

scene() { # scene NAME [SECONDS...]: runs a scene completely, and once for each time, interrupted after SECONDS
    local name=$1 seconds
    shift
    check "demo: $name" "${with_program[@]}" hack/demo.sh "$name"
    for seconds; do
        # shellcheck disable=SC2016 # $@ is for the inner shell
        check "demo: $name, interrupted after $seconds s" "${with_program[@]}" bash -c 'interrupted "$@"' _ "$name" "$seconds"
    done
}

# sanity POOL...: runs csi-sanity and counts its specs. Every other line that starts with
# "csi-sanity" reports a problem and counts as a failure.
sanity() {
    local line specs_failed=0
    is_selected "csi-sanity" || return 0
    matched=1
    perform "csi-sanity" "${with_program[@]}" hack/sanity.sh "$@" || return 0
    if ((status == 77)); then
        skip 1 "csi-sanity" "$(tail -n 1 "$log")"
        return
    fi
    while read -r line; do
        if [[ $line =~ ([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ pending,\ ([0-9]+)\ skipped$ ]]; then
            passed=$((passed + BASH_REMATCH[1]))
            specs_failed=$((specs_failed + BASH_REMATCH[2]))
            skipped=$((skipped + BASH_REMATCH[3] + BASH_REMATCH[4]))
        else
            specs_failed=$((specs_failed + 1))
        fi
    done < <(grep '^csi-sanity ' "$log")
    ((specs_failed > 0 || status == 0)) || specs_failed=1
    ((specs_failed == 0)) || fail "$specs_failed" "csi-sanity: $specs_failed specs or problems" "$log"
    print_result "csi-sanity" "" 200
    # On failure, print_result has printed these lines.
    ((status != 0)) || sed 's/^/             /' "$log"
}

# Tests find their binary themselves.
with_program=(env CSI_LOOPBACK_BIN="$program")

# scenes NAME REASON FUNCTION: runs the function, if the machine has what it needs.
scenes() {
    if [[ -z $program ]]; then
        fail 1 "$1: the build of the driver failed"
    elif [[ -n $why_no_root_tests ]]; then
        skip 1 "$1" "$why_no_root_tests"
    elif [[ -n $2 ]]; then
        skip 1 "$1" "$2"
    else
        "$3"
    fi
}

driver_scenes() {
    if [[ $tier == default ]]; then
        scene main
        sanity image
        return
    fi
    scene main 1 3
    scene inline
    sanity reflink image copy
    # Checks that every row runs. The figures of --quick are not meaningful.
    check "hack/bench.sh" hack/bench.sh --quick --output "$logs/bench"
    # The files of a release with this program, and a test of these files.
    # shellcheck disable=SC2016 # for the inner shell
    check "hack/release.sh" env "CARGO_TARGET_DIR=$target/trial" "RELEASE_BINARY=$program" bash -euc '
        version=$(sed -n "s/^version = \"\(.*\)\"/\1/p" Cargo.toml | head -n 1)
        hack/release-check.sh "$(hack/release.sh --trial "$version")"'
}

runtime_scenes() { scene runtime 3; }

cluster_scenes() {
    # Interrupted while its cluster starts.
    scene sidecar 8
    scene session
    scene aggregated
}

# A Kubernetes cluster with every pod of deploy/.
e2e_scenes() {
    [[ $tier != full ]] || collect "tools of scenes"
    check "hack/e2e.sh" "${with_program[@]}" hack/e2e.sh run
}

# --- Lanes, and the result --------------------------------------------------------------------------

# Each lane is a list of steps in sequence. One lane keeps less than half of a core busy.
storage_lane() {
    # In the full tier, the shortest lane has the power losses.
    local skips=()
    [[ $tier != full ]] || skips=(--skip power_loss::)
    tests storage --test-threads=1 "${skips[@]}"
    [[ $tier == default ]] || scenes "hack/e2e.sh" "$no_cluster" e2e_scenes
}

driver_lane() {
    local name
    lints
    if ((${#patterns[@]} == 0)); then
        for name in "${units[@]}"; do tests "$name, tests that need root" --test-threads=1 root_; done
    fi
    root_tests driver crash
    [[ $tier != full ]] || large_blocks
    for name in "${units[@]}"; do tests "$name" --skip root_; done
    tests no_root
    scenes "demo, csi-sanity and benchmarks" "" driver_scenes
}

# Parts of the names of tests that measure time while their clients keep both cores busy. In the full
# tier, to which all of them belong, they run after the lanes.
alone=(abuse_of flood junk_tokens_of a_thousand_concurrent)

cluster_lane() { # tests that need an API server
    local name skips=()
    if [[ $tier == full ]]; then
        for name in "${alone[@]}"; do skips+=(--skip "$name"); done
    fi
    tests api_server --test-threads=1 "${skips[@]}"
    root_tests deploy containers
    [[ $tier != default ]] || return 0
    [[ $tier != full ]] || tests "storage, power loss" --test-threads=1 power_loss::
    scenes "demo: runtime" "$no_containers" runtime_scenes
    scenes "demo: sidecar, session, aggregated" "$no_cluster" cluster_scenes
}

no_cluster='' no_containers=''
[[ -n ${CSI_LOOPBACK_KUBERNETES:-} ]] || no_cluster="needs the Kubernetes tools"
[[ -n $why_no_root_tests ]] || install_missing "${node_commands[@]}" || no_containers="needs containerd, ctr and runc"

lanes=(storage_lane driver_lane cluster_lane)
if ((${TEST_LANES:-3} > 1 && ${#patterns[@]} == 0)) && [[ -z $why_no_root_tests ]]; then
    in_lane() { # in_lane LANE: runs the steps of a lane in the background
        local started=$SECONDS
        mode=detached
        "$1"
        printf '  %5d s  %s\n' $((SECONDS - started)) "${1//_/ }" >>"$logs/lanes"
    }
    for lane in "${lanes[@]}"; do run_in_background in_lane "$lane"; done
    mode=collect
fi
for lane in "${lanes[@]}"; do "$lane"; done
mode=
if [[ $tier == full ]]; then
    phase "tests that run alone" 400
    sync # what the lanes have written
    tests "api_server, alone" --test-threads=1 "${alone[@]}"
fi
[[ -n $matched ]] || die "no test or step name contains: ${patterns[*]}"
((${#patterns[@]})) || check_leftovers
phase
if ((${#patterns[@]} == 0)); then
    print_phases "$(if_cold "$(if_full 4200 1200)" "$(if_full 3000 480)")"
    [[ ! -e $logs/lanes ]] || cat "$logs/lanes"
fi
printf '\nSlowest tests:\n'
sed -n 's/^test \(.*\) \.\.\. [a-zA-Z]* <\([0-9.]*\)s>$/\2 s  \1/p' "$logs"/*.log |
    sort -rn | sed -n '1,15 s/^/  /p' # sed reads to the end: head would close the pipe, which is an error here
finish
