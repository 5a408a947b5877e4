#!/usr/bin/env bash
# hack/test.sh: installs what is missing, then checks format, lints and licences, runs the tests,
# the demo and csi-sanity, and looks for what was left behind. Ends with one line of counts,
# "N passed, N failed, N skipped", and fails when anything failed.
#
# What cannot run on this machine (no root, no Go) is skipped with a line each and counted; with
# CI=true it counts as failed instead. The full output of each step stays in target/test-logs.
#
# TEST_TIMEOUT  seconds that a single step may take (3600)
# FUZZ_SECONDS  seconds for each fuzz target (10)
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

limit=${TEST_TIMEOUT:-3600}
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
logs=$target/test-logs
rm -rf "$logs"
mkdir -p "$logs"

passed=0
failed=0
skipped=0
failures=()
step_pid=
# Of its own, so that whatever is left in it was left by a test; short, because a socket's path has
# room for 107 bytes.
TMPDIR=$(mktemp -d /tmp/csi-loopback-test.XXXXXX)
export TMPDIR
list_loops | sort >"$logs/loops-before"
list_mounts | sort >"$logs/mounts-before"

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM
    trap - EXIT
    set +e
    if [[ -n $step_pid ]]; then
        # To `timeout`, which passes it on to all that it started.
        kill -TERM "$step_pid" 2>/dev/null || true
        wait "$step_pid" 2>/dev/null || true
    fi
    local pid
    while read -r pid _; do
        kill -KILL "$pid" 2>/dev/null || true
    done < <(processes_of "$TMPDIR")
    clear_directory "$TMPDIR" || true
    exit "$1"
}
# Each trap does it by itself: an `exit` from a signal's trap could end that of the exit before its
# first command.
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM

fail() { # fail COUNT WHAT
    failed=$((failed + $1))
    failures+=("$2")
}

skip() { # skip COUNT WHAT WHY
    if [[ ${CI:-} == true ]]; then
        printf 'FAILED             %s: %s (CI=true allows no skip)\n' "$2" "$3"
        fail "$1" "$2: $3"
    else
        printf 'SKIPPED            %s: %s\n' "$2" "$3"
        skipped=$((skipped + $1))
    fi
}

# run NAME COMMAND...: runs it with its output in the log of that name; sets log, status and took.
run() {
    local started=${EPOCHREALTIME/./} ms
    log=$logs/${1//[^A-Za-z0-9_-]/-}.log
    shift
    status=0
    # In the background, so that a signal to this script is heard while it runs.
    timeout --kill-after=60 "$limit" "$@" >"$log" 2>&1 &
    step_pid=$!
    wait "$step_pid" || status=$?
    step_pid=
    ms=$(((${EPOCHREALTIME/./} - started) / 1000))
    printf -v took '%4d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
    ((status != 124)) || echo "timed out after $limit s" >>"$log"
}

tell() { # tell NAME DETAIL: the line of the step that was just run, and why it failed if it did
    if ((status == 0)); then
        printf 'ok       %s  %s%s\n' "$took" "$1" "$2"
    else
        printf 'FAILED   %s  %s%s (exit %d, %s)\n' "$took" "$1" "$2" "$status" "$log"
        tail -n "${3:-80}" "$log" | sed 's/^/    /'
    fi
}

step() { # step NAME COMMAND...: counts as one, passed or failed
    run "$@"
    tell "$1" ""
    if ((status == 0)); then passed=$((passed + 1)); else fail 1 "$1"; fi
}

# run_tests NAME COMMAND...: runs a test binary and adds up what it reports. A test that finds the
# machine lacking something prints a line "SKIPPED: what: why", and is then counted as skipped; what
# it prints behind "report: " is shown.
run_tests() {
    local name=$1 ok=0 bad=0 ignored=0 lacking line
    run "$@"
    while read -r line; do
        [[ $line =~ ([0-9]+)\ passed\;\ ([0-9]+)\ failed\;\ ([0-9]+)\ ignored ]] || continue
        ok=$((ok + BASH_REMATCH[1]))
        bad=$((bad + BASH_REMATCH[2]))
        ignored=$((ignored + BASH_REMATCH[3]))
    done < <(grep '^test result:' "$log")
    mapfile -t lacking < <(sed -n 's/^SKIPPED: //p' "$log")
    ok=$((ok - ${#lacking[@]}))
    passed=$((passed + ok))
    skipped=$((skipped + ignored))
    if ((bad > 0)); then
        fail "$bad" "$name: $bad failed"
    elif ((status != 0)); then
        fail 1 "$name: exit $status"
    fi
    tell "$name" ": $ok passed, $bad failed, $((ignored + ${#lacking[@]})) skipped" 200
    sed -n 's/^report: /             report: /p; s/^test \(.*\) \.\.\. ignored/             ignored: \1/p' "$log"
    for line in "${lacking[@]}"; do
        skip 1 "${line%%: *}" "${line#*: }"
    done
}

finish() {
    if ((${#failures[@]})); then
        printf '\nFailed:\n'
        printf '  %s\n' "${failures[@]}"
    fi
    printf '\n%d s in all\n' "$SECONDS"
    printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    ((failed == 0))
}

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
fi

# --- Format, lints, licences ----------------------------------------------------------------------

if cargo_component rustfmt fmt; then
    step "cargo fmt" cargo fmt --check
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
# root_tests NAME BINARY: the tests of a binary that need root. One at a time: they share the machine's
# loop devices and load, and some measure time.
root_tests() {
    local name=$1 binary=$2 filter=(root_) count
    [[ $name != tests/root_* ]] || filter=()
    count=$(count_tests "$binary" "${filter[@]}")
    ((count)) || return 0
    [[ $name == tests/root_* ]] || name+=" (root_)"
    if [[ -n $why_no_root_tests ]]; then
        skip "$count" "$name, $count tests" "$why_no_root_tests"
    else
        run_tests "$name" "${timed[@]}" "$binary" "${report[@]}" --test-threads=1 "${filter[@]}"
    fi
}

for entry in "${tests[@]}"; do
    root_tests "${entry%%$'\t'*}" "${entry#*$'\t'}"
done

# --- Fuzzing --------------------------------------------------------------------------------------

# fuzz: runs every fuzz target for a while. Each is a test.
fuzz() {
    local bad
    run "fuzz" hack/fuzz.sh "${FUZZ_SECONDS:-10}"
    if ((status == 77)); then
        skip 1 "fuzz" "$(tail -n 1 "$log")"
        return
    fi
    passed=$((passed + $(grep -c '^ok ' "$log" || true)))
    bad=$(grep -c '^FAILED ' "$log" || true)
    ((bad > 0 || status == 0)) || bad=1
    ((bad == 0)) || fail "$bad" "fuzz: $bad targets"
    tell "fuzz" "" 200
    ((status != 0)) || sed -n 's/^ok /             &/p' "$log"
}
fuzz

# --- The demo and csi-sanity ----------------------------------------------------------------------

# interrupted_demo SECONDS DRIVER: interrupts the demo, which then has to say that it left nothing. (It may
# have come to its end before.)
interrupted_demo() {
    local output
    output=$(CSI_LOOPBACK_BIN=$2 timeout --signal=INT --kill-after=100 "$1" hack/demo.sh 2>&1) || true
    printf '%s\n' "$output"
    grep -q 'no mount, loop device, process or file is left' <<<"$output"
}
export -f interrupted_demo

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
        skip 1 "hack/demo.sh" "$why_no_root_tests"
    elif [[ -x hack/demo.sh ]]; then
        step "hack/demo.sh" hack/demo.sh
        for seconds in 1 2 3 4; do
            # shellcheck disable=SC2016 # $1 and $2 are for the inner shell
            step "hack/demo.sh, interrupted after $seconds s" \
                bash -c 'interrupted_demo "$1" "$2"' _ "$seconds" "$driver"
        done
    fi
    sanity
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
for entry in "${tests[@]}"; do
    root_tests "${entry%%$'\t'*}" "${entry#*$'\t'}"
done

# --- What was left behind -------------------------------------------------------------------------

# The kernel lets go of a loop device a moment after its last user.
for _ in {1..50}; do
    # By itself, or the end of a pipe would find its own beginning.
    processes=$(processes_of "$TMPDIR")
    left=$(
        mounts_below "$TMPDIR" | sed 's/^/mount /'
        loops_of "$TMPDIR" | sed 's/^/loop device /'
        [[ -z $processes ]] || printf 'process %s\n' "${processes//$'\n'/$'\nprocess '}"
        find "$TMPDIR" -xdev -mindepth 1 -maxdepth 2 | sed 's/^/file /; 20q'
    ) || true
    # Not below the directory of this run, so perhaps another's who works on this machine.
    elsewhere=$(
        list_loops | sort | comm -13 "$logs/loops-before" - | grep -vF " $TMPDIR/" | sed 's/^/loop device /'
        list_mounts | sort | comm -13 "$logs/mounts-before" - | grep -vF "$TMPDIR/" | sed 's/^/mount /'
    ) || true
    [[ -n $left$elsewhere ]] || break
    sleep 0.2
done
if [[ ${CI:-} == true && -n $elsewhere ]]; then
    left+=${left:+$'\n'}$elsewhere
elif [[ -n $elsewhere ]]; then
    printf 'note: new since the start, and not known to be of this run:\n'
    printf '%s\n' "$elsewhere" | sed 's/^/    /'
fi
if [[ -z $left ]]; then
    printf 'ok                 nothing left behind\n'
    passed=$((passed + 1))
else
    printf 'FAILED             left behind:\n'
    printf '%s\n' "$left" | sed 's/^/    /'
    fail 1 "left behind: loop devices, mounts, processes or files"
fi

printf '\nSlowest tests:\n'
sed -n 's/^test \(.*\) \.\.\. [a-zA-Z]* <\([0-9.]*\)s>$/\2 s  \1/p' "$logs"/*.log |
    sort -rn | head -n 10 | sed 's/^/  /'
finish
