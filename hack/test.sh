#!/usr/bin/env bash
# hack/test.sh: installs what is missing, then checks format, lints and licences, runs the tests,
# the demo and csi-sanity, and looks for what was left behind. Ends with one line of counts,
# "N passed, N failed, N skipped", and fails when anything failed.
#
# What cannot run on this machine (no root, no Go) is skipped with a line each and counted; with
# CI=true it counts as failed instead. The full output of each step stays in target/test-logs.
#
# TEST_TIMEOUT  seconds that a single step may take (3600)
# TEST_LANES    2: tests with a cluster and without a driver run beside the others; 1: one after the other (2)
# FUZZ_SECONDS  seconds for each fuzz target (8); hack/soak.sh is for more
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/steps.sh
source "$repo/hack/steps.sh"
cd "$repo"

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
rm -rf "$target/test-logs"
begin "${TEST_TIMEOUT:-3600}" "$target/test-logs"

# --- What is needed -------------------------------------------------------------------------------

command -v cargo >/dev/null || die "needs Rust: no cargo in PATH"
install_missing jq || die "needs jq"
why_no_root_tests=
if ! is_root; then
    why_no_root_tests="needs root, for loop devices and mounts"
elif ! install_missing "${storage_commands[@]}"; then
    why_no_root_tests="needs filesystem tools that could not be installed"
else
    # Who lacks them says so.
    install_missing "${load_commands[@]}" || true
    install_missing "${node_commands[@]}" || true
fi

# Where programs of Kubernetes are that tests run; without them the tests say what is missing.
if [[ -z $why_no_root_tests ]]; then
    # shellcheck disable=SC2016 # $1 is for the inner shell
    run "Kubernetes tools" bash -euc 'source "$1"; kubernetes_tools' _ "$repo/hack/lib.sh"
    if ((status == 0)); then
        CSI_LOOPBACK_KUBERNETES=$(tail -n 1 "$log")
        export CSI_LOOPBACK_KUBERNETES
        tell "Kubernetes tools" ""
        passed=$((passed + 1))
    else
        skip 1 "Kubernetes tools" "$(tail -n 1 "$log")"
    fi
else
    skip 1 "Kubernetes tools" "$why_no_root_tests"
fi

# --- Format, lints, licences ----------------------------------------------------------------------

if cargo_component rustfmt fmt; then
    step "cargo fmt" cargo fmt --check
    step "cargo fmt, fuzz targets" cargo fmt --check --manifest-path fuzz/Cargo.toml
else
    skip 1 "cargo fmt" "rustfmt is not installed, nor could it be"
fi
if install_missing shellcheck; then
    step "shellcheck" shellcheck --external-sources hack/*.sh .ci/run
else
    skip 1 "shellcheck" "not installed, nor could it be"
fi
if cargo_component clippy clippy; then
    step "cargo clippy" cargo clippy --all-targets --locked -- -D warnings
    step "cargo clippy, all features" cargo clippy --all-targets --all-features --locked -- -D warnings
else
    skip 1 "cargo clippy" "clippy is not installed, nor could it be"
fi
# Advisories are left out: they need a database from the network, and change without a commit.
if deny=$(cargo_deny 2>"$logs/cargo-deny-install.log"); then
    step "cargo deny" "$deny" --locked check bans licenses sources
else
    skip 1 "cargo deny" "$(tail -n 1 "$logs/cargo-deny-install.log")"
fi

# --- Tests ----------------------------------------------------------------------------------------

step "build" cargo build --locked
# An older binary may lie there still: it is not what is to be tested.
driver=
((status != 0)) || driver=$target/debug/csi-loopback
# The tests' binaries are run by this script and not by cargo, for the time of each test.
# shellcheck disable=SC2016 # $1 is for the inner shell
step "build tests" bash -c \
    'exec cargo test --locked --no-run --message-format=json-render-diagnostics >"$1"' \
    _ "$logs/artifacts.json"

# test_binaries ARTIFACTS: "NAME PATH" per test binary. Those that need root are integration tests called
# root_*; elsewhere it is the tests with root_ in their names.
test_binaries() {
    jq -r 'select(.reason == "compiler-artifact" and .profile.test and .executable != null)
        | (if .target.kind[0] == "test" then "tests/" else "unit tests of " end) + .target.name
          + "\t" + .executable' "$1"
}
tests=()
if ((status == 0)); then
    mapfile -t tests < <(test_binaries "$logs/artifacts.json")
    # Cargo sets this for the tests that it runs.
    export CARGO_MANIFEST_DIR=$repo
fi

# The time of each test is a feature of nightly compilers. The variable asks the test harness alone:
# it is not set while anything is compiled, so nothing is built twice.
report=(--show-output)
timed=()
if ((${#tests[@]})) &&
    RUSTC_BOOTSTRAP=1 "${tests[0]#*$'\t'}" --list -Z unstable-options --report-time >/dev/null 2>&1; then
    timed=(env RUSTC_BOOTSTRAP=1)
    report+=(-Z unstable-options --report-time)
fi

count_tests() { # count_tests BINARY ARGUMENT...
    "$@" --list --format terse 2>/dev/null | grep -c ': test$' || true
}

for entry in "${tests[@]}"; do
    name=${entry%%$'\t'*} binary=${entry#*$'\t'}
    [[ $name != tests/root_* ]] || continue
    (($(count_tests "$binary" --skip root_))) || continue
    run_tests "$name" "${timed[@]}" "$binary" "${report[@]}" --skip root_
done
run_tests "doc tests" cargo test --locked --doc --quiet

# From here to the fuzz targets the machine's second core would have little to do.
run_beside run "fuzz build" nice -n 19 hack/fuzz.sh 0

# root_tests HOW NAME BINARY: the tests of a binary that need root, by run_tests or its like. One at a time: they share
# the machine's loop devices and load, and some measure time.
root_tests() {
    local how=$1 name=$2 binary=$3 filter=(root_) count
    [[ $name != tests/root_* ]] || filter=()
    count=$(count_tests "$binary" "${filter[@]}")
    ((count)) || return 0
    [[ $name == tests/root_* ]] || name+=" (root_)"
    if [[ -n $why_no_root_tests ]]; then
        skip "$count" "$name, $count tests" "$why_no_root_tests"
    else
        "$how" "$name" "${timed[@]}" "$binary" "${report[@]}" --test-threads=1 "${filter[@]}"
    fi
}

# all_root_tests HOW ENTRY...
all_root_tests() {
    local how=$1 entry
    shift
    for entry; do
        root_tests "$how" "${entry%%$'\t'*}" "${entry#*$'\t'}"
    done
}

# Those with a cluster of their own, and no driver or node, mostly wait for it, and have nothing of the machine but
# processes. (Who begins a mount namespace, as nodes do, holds for a moment what all others have mounted.)
of_clusters=() others=()
for entry in "${tests[@]}"; do
    name=${entry%%$'\t'*}
    if grep -qs 'cluster::suite::run(' "$name.rs" "$name/main.rs" &&
        ! grep -rqsE 'driver::|Driver::|kubelet' "$name.rs" "$name"; then
        of_clusters+=("$entry")
    else
        others+=("$entry")
    fi
done
if [[ -n $why_no_root_tests || ${TEST_LANES:-2} == 1 ]]; then
    all_root_tests run_tests "${others[@]}" "${of_clusters[@]}"
else
    run_beside all_root_tests run_and_leave "${of_clusters[@]}"
    all_root_tests run_tests "${others[@]}"
    all_root_tests take_tests "${of_clusters[@]}"
fi

# --- Fuzzing --------------------------------------------------------------------------------------

run "fuzz" hack/fuzz.sh "${FUZZ_SECONDS:-8}"
count_fuzz "fuzz"

# --- The demo and csi-sanity ----------------------------------------------------------------------

# interrupted SCRIPT SECONDS DRIVER: interrupts a demonstration, which then has to say that it left nothing. (It may
# have come to its end before.)
interrupted() {
    local output
    output=$(CSI_LOOPBACK_BIN=$3 timeout --signal=INT --kill-after=100 "$2" "$1" 2>&1) || true
    printf '%s\n' "$output"
    grep -q 'no mount, loop device, process or file is left' <<<"$output"
}
export -f interrupted

# sanity: runs csi-sanity against every pool kind and adds up its counts. Each line that reports no
# counts reports a problem, and is one failure more.
sanity() {
    local pool line specs_failed=0
    run "csi-sanity" env CSI_LOOPBACK_BIN="$driver" hack/sanity.sh reflink image copy
    if ((status == 77)); then
        for pool in reflink image copy; do
            skip 1 "csi-sanity $pool" "$(tail -n 1 "$log")"
        done
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
    tell "csi-sanity" "" 200
    # When it failed, they stand among the lines just shown.
    ((status != 0)) || sed 's/^/             /' "$log"
}

if [[ -z $driver ]]; then
    printf 'FAILED             the demo and csi-sanity: the driver does not build\n'
    fail 1 "the demo and csi-sanity: the driver does not build"
else
    if [[ -x hack/demo.sh && -n $why_no_root_tests ]]; then
        skip 3 "hack/demo.sh, hack/demo-inline.sh, hack/demo-runtime.sh" "$why_no_root_tests"
    elif [[ -x hack/demo.sh ]]; then
        step "hack/demo.sh" hack/demo.sh
        for seconds in 1 2 3 4; do
            # shellcheck disable=SC2016 # $1 and the others are for the inner shell
            step "hack/demo.sh, interrupted after $seconds s" \
                bash -c 'interrupted "$@"' _ hack/demo.sh "$seconds" "$driver"
        done
        step "hack/demo-inline.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-inline.sh
        if install_missing "${node_commands[@]}"; then
            step "hack/demo-runtime.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-runtime.sh
            # shellcheck disable=SC2016 # $@ is for the inner shell
            step "hack/demo-runtime.sh, interrupted after 3 s" \
                bash -c 'interrupted "$@"' _ hack/demo-runtime.sh 3 "$driver"
        else
            skip 2 "hack/demo-runtime.sh" "needs containerd, ctr and runc"
        fi
    fi
    if [[ -z ${CSI_LOOPBACK_KUBERNETES:-} ]]; then
        skip 4 "hack/demo-sidecar.sh, hack/demo-session.sh, hack/demo-aggregated.sh, hack/demo-admission.sh" "needs root and the Kubernetes tools"
    else
        step "hack/demo-sidecar.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-sidecar.sh
        step "hack/demo-session.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-session.sh
        step "hack/demo-aggregated.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-aggregated.sh
        step "hack/demo-admission.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-admission.sh
        if install_missing "${node_commands[@]}"; then
            step "hack/demo-node-proxy.sh" env CSI_LOOPBACK_BIN="$driver" hack/demo-node-proxy.sh
            # With its cluster half made, and while its first pod begins.
            for seconds in 8 20; do
                # shellcheck disable=SC2016 # $@ is for the inner shell
                step "hack/demo-node-proxy.sh, interrupted after $seconds s" \
                    bash -c 'interrupted "$@"' _ hack/demo-node-proxy.sh "$seconds" "$driver"
            done
        else
            skip 3 "hack/demo-node-proxy.sh" "needs containerd, ctr and runc"
        fi
    fi
    sanity
fi

# That every row of the bench still runs: its figures are nothing to pass or fail.
if [[ -n $why_no_root_tests ]]; then
    skip 1 "hack/bench.sh" "$why_no_root_tests"
else
    step "hack/bench.sh" hack/bench.sh --quick --output "$logs/bench"
fi

# --- Death and errors at every step -----------------------------------------------------------------

if [[ -n $driver ]]; then
    # shellcheck disable=SC2016 # $1 is for the inner shell
    step "the driver has no fail points" bash -c '! grep --text --fixed-strings fail-points "$1"' _ "$driver"
fi
# The last of all builds: from here on the driver in the target directory is another one.
driver=
# shellcheck disable=SC2016 # $1 is for the inner shell
step "build with fail points" bash -c \
    'exec cargo test --locked --features failpoints --test root_crash --no-run --message-format=json-render-diagnostics >"$1"' \
    _ "$logs/artifacts-failpoints.json"
tests=()
if ((status == 0)); then
    mapfile -t tests < <(test_binaries "$logs/artifacts-failpoints.json")
fi
all_root_tests run_tests "${tests[@]}"

# --- What was left behind -------------------------------------------------------------------------

check_left_behind

printf '\nSlowest tests:\n'
sed -n 's/^test \(.*\) \.\.\. [a-zA-Z]* <\([0-9.]*\)s>$/\2 s  \1/p; s/^took \([0-9.]* s\): /\1  /p' \
    "$logs"/*.log |
    sort -rn | sed -n '1,10 s/^/  /p' # reads to the end: a pipe that is closed early would be an error
finish
