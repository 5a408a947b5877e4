#!/usr/bin/env bash
# hack/test.sh [--full] [PATTERN...]: installs what is missing, then runs the checks and tests of this tree.
#
#   (no argument)  the default tier: format, lints, unit tests and the core of every promise; 8 minutes
#   --full         every test at its full size, csi-sanity on every pool kind, every scene of the demo, the bench's
#                  rows in small, licences; 42 minutes. What a continuous build runs
#   PATTERN...     the tests, of both tiers, and the steps whose names contain one of the patterns, at full size; the
#                  name of a test binary (driver, storage, crash, api_server, ...) stands for all of its tests
#
# Prints a line for each step, the time of each phase beside its budget, the slowest tests, and as its last line
# "N passed, N failed, N skipped". Fails when a test failed. What this machine cannot run (no root, no Go) is skipped
# with a line that gives the reason; with CI=true it counts as failed. The output of each step stays in
# target/test-logs.
#
# TEST_TIMEOUT  seconds that a step may take (3600)
# TEST_LANES    2: tests with an API server run beside the tests of the driver; 1: one after the other (2)
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
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" && exit ;;
        -*) die "$argument: no such option; see --help" ;;
        *) patterns+=("$argument") ;;
    esac
done
# Tests of the full tier alone are marked #[ignore = "full tier"]. The other tests that have a size take it from these.
if ((${#patterns[@]})); then
    tier=selected
elif [[ $tier == default ]]; then
    export ORACLE_CASES=2 POWER_LOSS_IMAGES=6 FILESYSTEMS_SECONDS=1 CRASH_SAMPLE=30 FUZZ_INPUTS=8000
fi

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
# Budgets are in seconds on two cores, where everything has been built before (warm) and where nothing has (cold).
start=warm
[[ -d $cache/tools/$(kubernetes_key) && -d $target/debug/deps ]] || start=cold
if_cold() { if [[ $start == cold ]]; then echo "$1"; else echo "$2"; fi; }
if_full() { if [[ $tier == full ]]; then echo "$1"; else echo "$2"; fi; }

rm -rf "$target/test-logs"
begin "${TEST_TIMEOUT:-3600}" "$target/test-logs"

# Whether any test or step has run that the patterns name.
matched=
# wanted NAME: whether a step of this name is to run.
wanted() {
    local pattern
    ((${#patterns[@]})) || return 0
    for pattern in "${patterns[@]}"; do
        [[ $1 != *"$pattern"* ]] || return 0
    done
    return 1
}

# check NAME COMMAND...: a step, if it is wanted.
check() {
    wanted "$1" || return 0
    matched=1
    step "$@"
}

# --- Tools ------------------------------------------------------------------------------------------

phase tools "$(if_cold 60 20)"
command -v cargo >/dev/null || die "needs Rust: no cargo in PATH"
install_missing gcc jq || die "needs gcc and jq"
why_no_root_tests=
if ! is_root; then
    why_no_root_tests="needs root, for loop devices and mounts"
elif ! install_missing "${storage_commands[@]}"; then
    why_no_root_tests="needs filesystem tools that could not be installed"
else
    # Tests that lack one of these skip themselves.
    install_missing "${load_commands[@]}" || true
    install_missing "${node_commands[@]}" || true
fi
# Beside what cargo compiles: neither keeps two cores busy by itself.
# shellcheck disable=SC2016 # $1 is for the inner shell
[[ -n $why_no_root_tests ]] || run_beside run_and_leave "Kubernetes tools" \
    bash -euc 'source "$1"; kubernetes_tools' _ "$repo/hack/lib.sh"

# --- Format, lints, licences ------------------------------------------------------------------------

phase checks "$(if_cold 360 60)"
if ! cargo_component rustfmt fmt; then
    skip 1 "cargo fmt" "rustfmt is not installed and could not be installed"
else
    check "cargo fmt" cargo fmt --all --check
    check "cargo fmt, fuzz targets" cargo fmt --check --manifest-path fuzz/Cargo.toml
fi
if ! install_missing shellcheck; then
    skip 1 "shellcheck" "not installed and could not be installed"
else
    mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
    check "shellcheck" shellcheck --external-sources "${scripts[@]}"
fi
if ! cargo_component clippy clippy; then
    skip 1 "cargo clippy" "clippy is not installed and could not be installed"
else
    check "cargo clippy" cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
fi
# Advisories need a database from the network, which changes without a commit: they are not checked.
if [[ $tier == full ]] || { [[ $tier == selected ]] && wanted "cargo deny"; }; then
    if deny=$(cargo_deny 2>"$logs/cargo-deny-install.log"); then
        check "cargo deny" "$deny" --locked check bans licenses sources
    else
        skip 1 "cargo deny" "$(tail -n 1 "$logs/cargo-deny-install.log")"
    fi
fi

# --- Build ------------------------------------------------------------------------------------------

phase build "$(if_cold 420 180)"
# What ships has no fail points. It is built first: the tests' build replaces it in the target directory. The default tier
# has one build; its scenes run the program that its tests run.
program=
if [[ $tier != default ]]; then
    step "build what ships" cargo build --locked --bin csi-loopback
    if ((status == 0)); then
        program=$target/shipped/csi-loopback
        mkdir -p "${program%/*}"
        cp "$target/debug/csi-loopback" "$program"
        # shellcheck disable=SC2016 # $1 is for the inner shell
        check "what ships has no fail points" bash -c '! grep --text --fixed-strings fail-points "$1"' _ "$program"
    fi
fi
# The tests' binaries are run by this script and not by cargo, for their lanes and for the time of each test.
# shellcheck disable=SC2016 # $1 is for the inner shell
step "build tests" bash -c \
    'exec cargo test --workspace --all-features --locked --no-run --message-format=json-render-diagnostics >"$1"' \
    _ "$logs/artifacts.json"
((status == 0)) || finish
[[ $tier != default ]] || program=$target/debug/csi-loopback
declare -A binary_of=()
while IFS=$'\t' read -r name path; do
    binary_of[$name]=$path
done < <(jq -r 'select(.reason == "compiler-artifact" and .profile.test and .executable != null)
    | (if .target.kind[0] == "test" then .target.name else "unit" end) + "\t" + .executable' "$logs/artifacts.json")
# Cargo sets this for the tests that it runs.
export CARGO_MANIFEST_DIR=$repo

# --- Kubernetes tools -------------------------------------------------------------------------------

# Tests that lack these programs say so, each by itself.
phase "the Kubernetes tools" "$(if_cold 120 5)"
if [[ -n $why_no_root_tests ]]; then
    skip 1 "Kubernetes tools" "$why_no_root_tests"
else
    take "Kubernetes tools"
    if ((status == 0)); then
        CSI_LOOPBACK_KUBERNETES=$(tail -n 1 "$log")
        export CSI_LOOPBACK_KUBERNETES
        tell "Kubernetes tools" ""
        passed=$((passed + 1))
    else
        skip 1 "Kubernetes tools" "$(tail -n 1 "$log")"
    fi
fi

# --- Tests ------------------------------------------------------------------------------------------

phase tests "$(if_full 1920 430)"
arguments=(--show-output)
[[ $tier == default ]] || arguments+=(--include-ignored)
# The time of each test is a feature of nightly compilers. The variable asks the test harness alone: it is not set
# while anything is compiled, so nothing is built twice.
timed=()
if RUSTC_BOOTSTRAP=1 "${binary_of[unit]}" --list -Z unstable-options --report-time >/dev/null 2>&1; then
    timed=(env RUSTC_BOOTSTRAP=1)
    arguments+=(-Z unstable-options --report-time)
fi

# filter NAME: the patterns by which the tests of a binary are chosen; none where the binary itself is named.
filter() {
    local pattern
    for pattern in "${patterns[@]}"; do
        [[ $pattern != "$1" ]] || return 0
    done
    ((${#patterns[@]} == 0)) || printf '%s\n' "${patterns[@]}"
}

# tests HOW NAME [ARGUMENT...]: runs the tests of a binary by run_tests or its like. Those that need root run one at a
# time: they share the machine's loop devices, and some measure time.
tests() {
    local how=$1 name=$2 binary=${binary_of[${2%% *}]} chosen count
    shift 2
    mapfile -t chosen < <(filter "$name")
    count=$("$binary" --list --format terse "${chosen[@]}" "$@" 2>/dev/null | grep -c ': test$' || true)
    ((count)) || return 0
    matched=1
    if [[ -n $why_no_root_tests && " $* " != *" --skip root_ "* && $name != no_root ]]; then
        skip "$count" "$name, $count tests" "$why_no_root_tests"
    else
        "$how" "$name" "${timed[@]}" "$binary" "${arguments[@]}" "${chosen[@]}" "$@"
    fi
}

tests_of() { # tests_of HOW NAME...: binaries that need root
    local how=$1 name
    shift
    for name; do tests "$how" "$name" --test-threads=1; done
}

# Two lanes. A lane is a list of test binaries; which one a test is in follows from the binary that it is in.
other_lane() { # other_lane HOW: what needs an API server, and what needs no root
    tests "$1" "unit" --skip root_
    tests "$1" "no_root"
    tests_of "$1" api_server deploy containers
}
without=(driver storage crash)
lanes=${TEST_LANES:-2}
if ((${#patterns[@]})) || [[ -n $why_no_root_tests ]]; then lanes=1; fi
((lanes == 1)) || run_beside other_lane run_and_leave
if ((${#patterns[@]} == 0)); then
    tests run_tests "unit tests that need root" --test-threads=1 root_
fi
tests_of run_tests "${without[@]}"
# The proofs once more with the other block size. Where the kernel mounts 64 KiB, image pools of the storage tests have it.
if [[ $tier == full ]]; then
    small=4096 large=65536
    if printf '6.12\n%s\n' "$(uname -r)" | sort -VC; then
        POOL_BLOCK_SIZE=$small tests run_tests "storage with blocks of 4 KiB" --test-threads=1 --exact \
            oracle::an_image_pool_never_misses_a_changed_block \
            power_loss::an_image_pool_keeps_what_was_acknowledged_through_a_power_cut
        POOL_BLOCK_SIZE=$large CRASH_ONLY=cut CRASH_SAMPLE=4 tests run_tests "crash with blocks of 64 KiB" \
            --test-threads=1 a_driver_killed_at_any_point
    else
        skip 1 "image pools with blocks of 64 KiB" "Linux mounts them since 6.12, this is $(uname -r)"
    fi
fi

# --- Scenes of the demo, csi-sanity, the bench ------------------------------------------------------

# interrupted SCENE SECONDS: interrupts a scene, which then has to report that it left nothing, as it does at its end.
interrupted() {
    local output
    output=$(timeout --signal=INT --kill-after=100 "$2" hack/demo.sh "$1" 2>&1) || true
    printf '%s\n' "$output"
    grep -q 'no mount, loop device, process or file is left' <<<"$output"
}
export -f interrupted

scene() { # scene NAME [SECONDS...]: runs a scene, and once more for each of the times, after which it is interrupted
    local name=$1 seconds
    shift
    check "demo: $name" hack/demo.sh "$name"
    for seconds; do
        # shellcheck disable=SC2016 # $@ is for the inner shell
        check "demo: $name, interrupted after $seconds s" bash -c 'interrupted "$@"' _ "$name" "$seconds"
    done
}

# sanity POOL...: runs csi-sanity and adds up its counts. Each line that reports no counts reports a problem, and is one
# failure more.
sanity() {
    local line specs_failed=0
    wanted "csi-sanity" || return 0
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
    tell "csi-sanity" "" 200
    # When it failed, they are among the lines just shown.
    ((status != 0)) || sed 's/^/             /' "$log"
}

phase scenes "$(if_full 420 40)"
if [[ -z $program ]]; then
    printf 'FAILED             the demo and csi-sanity: the driver does not build\n'
    fail 1 "the demo and csi-sanity: the driver does not build"
elif [[ -n $why_no_root_tests ]]; then
    skip 1 "the demo, csi-sanity and the bench" "$why_no_root_tests"
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
            scene sidecar
            scene session
            scene aggregated
            scene admission
            # With its cluster half made, and while its first pod starts.
            ! install_missing "${node_commands[@]}" || scene node-proxy 8 20
        else
            skip 5 "demo: sidecar, session, aggregated, admission, node-proxy" "needs the Kubernetes tools"
        fi
        sanity reflink image copy
        # That every row still runs: its figures here are nothing to pass or fail.
        check "hack/bench.sh" hack/bench.sh --quick --output "$logs/bench"
    fi
fi

# --- The tests that ran beside ----------------------------------------------------------------------

if ((lanes == 1)); then
    other_lane run_tests
else
    phase "the other lane" "$(if_full 120 30)"
    other_lane take_tests
fi
[[ -n $matched ]] || die "no test and no step has a name that contains: ${patterns[*]}"
((${#patterns[@]})) || check_left_behind
phase
((${#patterns[@]})) || tell_phases "$(if_cold "$(if_full 3720 1200)" "$(if_full 2520 480)")"
printf '\nSlowest tests:\n'
sed -n 's/^test \(.*\) \.\.\. [a-zA-Z]* <\([0-9.]*\)s>$/\2 s  \1/p' "$logs"/*.log |
    sort -rn | sed -n '1,15 s/^/  /p' # reads to the end: a pipe that is closed early would be an error
finish
