#!/usr/bin/env bash
# hack/test.sh [--full] [PATTERN...]: installs missing tools, then runs the checks and tests of this
# tree.
#
#   (no argument)  default tier: format, lints, unit tests and the core tests of every promise; 8 minutes
#   --full         full tier: every test at full size, csi-sanity on every pool kind, every demo scene, small
#                  runs of the benchmarks, licenses; 50 minutes. CI runs this tier
#   PATTERN...     tests of both tiers and steps whose names contain a pattern, at full size. The name of a
#                  test binary (driver, storage, crash, api_server, ...) selects all of its tests
#
# Prints one line per step, the time and budget of each phase, the slowest tests, and as the last
# line "N passed, N failed, N skipped". Exits with 1 if a test failed. A test that cannot run on
# this machine (no root, no Go) is skipped, and its line gives the reason; with CI=true it is a
# failure. The logs are in target/test-logs.
#
# TEST_TIMEOUT  timeout of a step in seconds (3600)
# TEST_LANES    2: run tests with an API server in parallel to tests of the driver; 1: in sequence (2)
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

phase tools "$(if_cold 60 20)"
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
fi
# In parallel to cargo: neither build keeps two cores busy.
# shellcheck disable=SC2016 # $1 is for the inner shell
[[ -n $why_no_root_tests ]] || run_in_background run_detached "Kubernetes tools" \
    bash -euc 'source "$1"; kubernetes_tools' _ "$repo/hack/lib.sh"

# --- Format, lints, licenses ------------------------------------------------------------------------

phase checks "$(if_cold 45 30)"
if ! cargo_component rustfmt fmt; then
    skip 1 "cargo fmt" "rustfmt is missing and could not be installed"
else
    check "cargo fmt" cargo fmt --all --check
    check "cargo fmt, fuzz targets" cargo fmt --check --manifest-path fuzz/Cargo.toml
fi
if ! install_missing shellcheck; then
    skip 1 "shellcheck" "shellcheck is missing and could not be installed"
else
    mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
    check "shellcheck" shellcheck --external-sources "${scripts[@]}"
fi
# Without advisories: their database comes from the network and changes without a commit.
if [[ $tier == full ]] || { [[ $tier == selected ]] && is_selected "cargo deny"; }; then
    if deny=$(cargo_deny 2>"$logs/cargo-deny-install.log"); then
        check "cargo deny" "$deny" --locked check bans licenses sources
    else
        skip 1 "cargo deny" "$(tail -n 1 "$logs/cargo-deny-install.log")"
    fi
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
        cargo build --workspace --benches --all-features --locked' _ "$logs/artifacts.json"
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
while IFS=$'\t' read -r name path; do
    binary_of[$name]=$path
done < <(jq -r 'select(.reason == "compiler-artifact" and .profile.test and .executable != null)
    | if .target.kind[0] == "test" then .target.name + "\t" + .executable
      elif .target.name == "csi_loopback" then "unit\t" + .executable else empty end' "$logs/artifacts.json")
# Cargo sets this variable for tests.
export CARGO_MANIFEST_DIR=$repo

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

phase tests "$(if_full 1920 430)"
arguments=(--show-output)
[[ $tier == default ]] || arguments+=(--include-ignored)
# Test times are a feature of nightly compilers. RUSTC_BOOTSTRAP is set for the test harness only,
# not for cargo, which would rebuild everything.
timed=()
if RUSTC_BOOTSTRAP=1 "${binary_of[unit]}" --list -Z unstable-options --report-time >/dev/null 2>&1; then
    timed=(env RUSTC_BOOTSTRAP=1)
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

# tests RUNNER NAME [ARGUMENT...]: runs the selected tests of a binary with RUNNER (run_tests,
# run_detached or collect_tests). Tests that need root run one at a time: they share the loop
# devices, and some measure time.
tests() {
    local runner=$1 name=$2 binary=${binary_of[${2%% *}]} filters count
    shift 2
    mapfile -t filters < <(filter "$name")
    count=$("$binary" --list --format terse "${filters[@]}" "$@" 2>/dev/null | grep -c ': test$' || true)
    if ((count == 0)); then
        # A name that no longer exists must not pass as a test.
        ((${#patterns[@]})) || fail 1 "$name: no test matches"
        return 0
    fi
    matched=1
    if [[ -n $why_no_root_tests && " $* " != *" --skip root_ "* && $name != no_root ]]; then
        skip "$count" "$name, $count tests" "$why_no_root_tests"
    else
        "$runner" "$name" "${timed[@]}" "$binary" "${arguments[@]}" "${filters[@]}" "$@"
    fi
}

root_tests() { # root_tests RUNNER NAME...: runs binaries whose tests need root
    local runner=$1 name
    shift
    for name; do tests "$runner" "$name" --test-threads=1; done
}

# Two lanes, each a list of test binaries. Tests that need no root are in the lane that is shorter in
# this tier.
no_root_tests() { # no_root_tests RUNNER
    tests "$1" "unit" --skip root_
    tests "$1" "no_root"
}
cluster_lane() { # cluster_lane RUNNER: tests that need an API server
    [[ $tier == default ]] || no_root_tests "$1"
    root_tests "$1" api_server deploy containers
}
driver_lane=(driver storage crash)
lanes=${TEST_LANES:-2}
if ((${#patterns[@]})) || [[ -n $why_no_root_tests ]]; then lanes=1; fi
((lanes == 1)) || run_in_background cluster_lane run_detached
if ((${#patterns[@]} == 0)); then
    tests run_tests "unit tests that need root" --test-threads=1 root_
fi
root_tests run_tests "${driver_lane[@]}"
[[ $tier != default ]] || no_root_tests run_tests
# The proofs again with the largest block size.
if [[ $tier == full ]]; then
    large=65536
    if printf '6.12\n%s\n' "$(uname -r)" | sort -VC; then
        POOL_BLOCK_SIZE=$large tests run_tests "storage with blocks of 64 KiB" --test-threads=1 --exact \
            oracle::an_image_pool_never_misses_a_changed_block \
            power_loss::an_image_pool_keeps_acknowledged_data_after_power_loss
        POOL_BLOCK_SIZE=$large CRASH_ONLY=snapshot CRASH_SAMPLE=4 tests run_tests "crash with blocks of 64 KiB" \
            --test-threads=1 a_call_converges_after_a_kill_at_any_point
    else
        skip 1 "image pools with blocks of 64 KiB" "needs Linux 6.12 or later, not $(uname -r)"
    fi
fi

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
    check "demo: $name" hack/demo.sh "$name"
    for seconds; do
        # shellcheck disable=SC2016 # $@ is for the inner shell
        check "demo: $name, interrupted after $seconds s" bash -c 'interrupted "$@"' _ "$name" "$seconds"
    done
}

# sanity POOL...: runs csi-sanity and counts its specs. Every other line that starts with
# "csi-sanity" reports a problem and counts as a failure.
sanity() {
    local line specs_failed=0
    is_selected "csi-sanity" || return 0
    matched=1
    run "csi-sanity" hack/sanity.sh "$@"
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
    ((specs_failed == 0)) || fail "$specs_failed" "csi-sanity: $specs_failed specs or problems"
    print_result "csi-sanity" "" 200
    # On failure, print_result has printed these lines.
    ((status != 0)) || sed 's/^/             /' "$log"
}

phase scenes "$(if_full 900 40)"
if [[ -z $program ]]; then
    printf 'FAILED             demo and csi-sanity: the build of the driver failed\n'
    fail 1 "demo and csi-sanity: the build of the driver failed"
elif [[ -n $why_no_root_tests ]]; then
    skip 1 "demo, csi-sanity and benchmarks" "$why_no_root_tests"
else
    export CSI_LOOPBACK_BIN=$program
    if [[ $tier == default ]]; then
        scene main
        sanity image
    else
        scene main 1 3
        scene inline
        if install_missing "${node_commands[@]}"; then
            scene runtime 3
        else
            skip 1 "demo: runtime" "needs containerd, ctr and runc"
        fi
        if [[ -n ${CSI_LOOPBACK_KUBERNETES:-} ]]; then
            # Interrupted while its cluster starts.
            scene sidecar 8
            scene session
            scene aggregated
            # A Kubernetes cluster with every pod of deploy/.
            check "hack/e2e.sh" hack/e2e.sh run
        else
            skip 4 "hack/e2e.sh, demo: sidecar, session, aggregated" "needs the Kubernetes tools"
        fi
        sanity reflink image copy
        # Checks that every row runs. The figures of --quick are not meaningful.
        check "hack/bench.sh" hack/bench.sh --quick --output "$logs/bench"
    fi
fi

# --- The other lane, and the result -----------------------------------------------------------------

if ((lanes == 1)); then
    cluster_lane run_tests
else
    phase "other lane" "$(if_full 120 30)"
    cluster_lane collect_tests
fi
[[ -n $matched ]] || die "no test or step name contains: ${patterns[*]}"
((${#patterns[@]})) || check_leftovers
phase
((${#patterns[@]})) || print_phases "$(if_cold "$(if_full 4500 1200)" "$(if_full 3000 480)")"
printf '\nSlowest tests:\n'
sed -n 's/^test \(.*\) \.\.\. [a-zA-Z]* <\([0-9.]*\)s>$/\2 s  \1/p' "$logs"/*.log |
    sort -rn | sed -n '1,15 s/^/  /p' # sed reads to the end: head would close the pipe, which is an error here
finish
