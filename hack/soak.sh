#!/usr/bin/env bash
# hack/soak.sh [MINUTES]: runs long versions of the tests that search for missed changes and lost
# snapshots: the oracle, sequences of failures, filesystems under load, crashes at every fail point,
# power loss, growth, kills of backups, fuzz targets, the sidecar and, by promtool, alerts. It repeats them in rounds with
# fresh seeds and larger sizes for MINUTES (60), including the build. A step that does not fit in
# the remaining time is reduced or omitted.
#
# Prints one line per step and per round, and at the end "N passed, N failed, N skipped". After a
# failure, logs, images after a power cut and inputs of fuzz targets are kept in target/soak/TIME,
# and the path is printed.
#
# SOAK_STEPS  steps to run ("oracle failures filesystems crash power-loss growth backup fuzz sidecar alerts")
# SOAK_POOL   pool kind of oracle and failures: reflink, image or copy (all)
#
# Needs root. An interrupt stops it and removes everything that it created.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/steps.sh
source "$repo/hack/steps.sh"
cd "$repo"

minutes=${1:-60}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || die "not a number of minutes: $minutes"
steps=${SOAK_STEPS:-oracle failures filesystems crash power-loss growth backup fuzz sidecar alerts}

# Size of each step in the first round, minimum, and maximum: cases, seconds or images. 1: the step
# has no size.
declare -A size=([oracle]=20 [failures]=40 [filesystems]=12 [crash]=1 [power-loss]=100 [growth]=1 [backup]=10 [fuzz]=30 [sidecar]=1 [alerts]=1)
declare -A least=([oracle]=2 [failures]=2 [filesystems]=3 [crash]=1 [power-loss]=20 [growth]=1 [backup]=3 [fuzz]=5 [sidecar]=1 [alerts]=1)
declare -A most=([oracle]=2000 [failures]=5000 [filesystems]=600 [crash]=1 [power-loss]=2000 [growth]=1 [backup]=500 [fuzz]=1200 [sidecar]=1 [alerts]=1)
# Estimated milliseconds of each step: fixed, and per unit of size. Measurements replace these
# estimates.
declare -A fixed=([oracle]=5000 [failures]=5000 [filesystems]=60000 [crash]=300000 [power-loss]=20000 [growth]=1200000 [backup]=60000 [fuzz]=5000 [sidecar]=240000 [alerts]=300000)
declare -A each=([oracle]=6000 [failures]=12000 [filesystems]=15000 [crash]=0 [power-loss]=2000 [growth]=0 [backup]=4000 [fuzz]=18000 [sidecar]=0 [alerts]=0)
for name in $steps; do
    [[ -n ${size[$name]:-} ]] || die "unknown step $name; steps: ${!size[*]}"
done

is_root || die "needs root, for loop devices and mounts"
command -v cargo >/dev/null || die "cargo is not in PATH; install Rust"
install_missing "${storage_commands[@]}" "${load_commands[@]}" || die "required commands are missing"

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
kept=$target/soak/$(date --utc +%Y%m%dT%H%M%SZ)
begin 3600 "$kept"
# Settings of the environment must not change the steps.
unset "${!ORACLE_@}" "${!FILESYSTEMS_@}" "${!CRASH_@}" "${!POWER_LOSS_@}" "${!GROWTH_@}" "${!BACKUP_@}" \
    "${!FUZZ_@}" "${!SIDECAR_@}"

# remaining_ms: prints the remaining milliseconds.
remaining_ms() { echo $((minutes * 60000 - SECONDS * 1000)); }

# fitting NAME: prints the size of the step that fits in the remaining time, with a fifth in
# reserve; 0 if none.
fitting() {
    local units=${size[$1]} available
    available=$(($(remaining_ms) * 4 / 5 - fixed[$1]))
    ((available > 0)) || units=0
    if ((each[$1] > 0 && units * each[$1] > available)); then units=$((available / each[$1])); fi
    ((units >= least[$1])) || units=0
    echo "$units"
}

# tests NAME CARGO-ARGUMENT... [-- SETTING...]: runs an integration test with these settings. With
# cargo, which replaces the csi-loopback binary with one of the right features.
tests() {
    local name=$1 arguments=()
    shift
    while (($#)) && [[ $1 != -- ]]; do
        arguments+=("$1")
        shift
    done
    (($# == 0)) || shift
    label="$name${*:+ ($*)}"
    run "$name-$round" env "$@" cargo test --locked --all-features "${arguments[@]}" -- \
        --show-output --test-threads=1 --include-ignored
}

# start NAME SIZE: runs the step.
start() {
    local settings=("ORACLE_SEED=$(((RANDOM << 15 | RANDOM) % 1000000000))" "ORACLE_CASES=$2")
    [[ -z ${SOAK_POOL:-} ]] || settings+=("ORACLE_POOL=$SOAK_POOL")
    case $1 in
        oracle) tests oracle --test storage oracle:: -- "${settings[@]}" ;;
        failures) tests failures --test storage failures:: -- "${settings[@]}" ;;
        filesystems) tests filesystems --test storage filesystems:: -- "FILESYSTEMS_SECONDS=$2" ;;
        crash) tests crash --test crash -- CRASH_POOLS=all ;;
        sidecar) tests sidecar --test api_server sidecar:: -- SIDECAR_STALL_SECONDS=60 ;;
        power-loss)
            tests power-loss --test storage power_loss:: -- "POWER_LOSS_IMAGES=$2" \
                "POWER_LOSS_KEEP=$kept/images-$round"
            ;;
        growth) tests growth --test storage growth -- GROWTH_EVERY=1 ;;
        backup) tests backup --test driver backup::killed:: -- "BACKUP_KILLS=$2" ;;
        alerts)
            label=alerts
            # shellcheck disable=SC2016 # $1 is for the inner shell
            run "alerts-$round" bash -euc 'source "$1" && tool=$(go_tool promtool) || exit 77
                "$tool" check rules deploy/monitoring/rules.yaml
                "$tool" test rules tests/data/rules.test.yaml' _ "$repo/hack/lib.sh"
            ;;
        fuzz)
            label="fuzz ($2 s for each target)"
            fuzz "fuzz-$round" "$2"
            ;;
    esac
}

# fuzz NAME SECONDS: runs each fuzz target for SECONDS with the seeds and what earlier runs found. No
# sanitizer: the fuzzed code has no unsafe blocks, and a sanitizer halves the number of inputs.
fuzz() {
    # shellcheck disable=SC2016 # the arguments are for the inner shell
    run "$1" env RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR="$target/fuzz" bash -euc 'source "$1" && status=0
        command -v c++ >/dev/null || install_missing g++ || exit 77
        tool=$(cargo_fuzz) || exit 77
        for name in $("$tool" fuzz list); do
            mkdir -p "$CARGO_TARGET_DIR/corpus/$name"
            "$tool" fuzz run --sanitizer none --codegen-units 16 "$name" "$CARGO_TARGET_DIR/corpus/$name" \
                "fuzz/seeds/$name" -- -rss_limit_mb=1024 -timeout=20 -max_len=8192 -max_total_time="$2" || status=1
        done
        exit "$status"' _ "$repo/hack/lib.sh" "$2"
}

# count NAME: counts the tests of the step.
count() {
    if [[ $1 == alerts || $1 == fuzz ]]; then
        count_step "round $round, $label"
        # cargo-fuzz puts failing inputs there.
        if [[ $1 == fuzz ]] && ((status != 0 && status != 77)); then mv fuzz/artifacts "$kept/fuzz-inputs-$round" || true; fi
    else
        count_tests "round $round, $label"
    fi
}

# soak NAME: runs one step of a round. Fails if the step does not fit in the remaining time.
soak() {
    local units began=${EPOCHREALTIME/./} ms due expected failed_before=$failed
    units=$(fitting "$1")
    ((units > 0)) || return 1
    expected=$((fixed[$1] + units * each[$1]))
    # A step that takes much longer than expected hangs. The limit of MINUTES applies in any case.
    due=$((expected * 3 / 1000 + 300))
    limit=$(($(remaining_ms) / 1000))
    ((limit < due)) || limit=$due
    start "$1" "$units"
    ms=$(((${EPOCHREALTIME/./} - began) / 1000))
    if ((status == 124 && limit < due)); then
        printf 'stopped  %s  %s: time limit reached\n' "$took" "$label"
        clear_up_between
        return 1
    fi
    count "$1"
    find_leftovers
    if [[ -n $leftovers ]]; then
        print_leftovers
        fail 1 "round $round, $label: remaining mounts, loop devices, processes or files"
        clear_up_between
    fi
    ((failed > failed_before)) || rm -f "$log"
    if ((status == 0)); then learn "$1" "$units" "$ms"; fi
    grow "$1"
}

# clear_up_between: like clear_up, but keeps an empty TMPDIR for the next step.
clear_up_between() {
    clear_up
    mkdir -p "$TMPDIR"
}

# learn NAME SIZE MS: updates the estimate with a measurement.
learn() {
    if ((most[$1] == 1)); then
        fixed[$1]=$3
        return
    fi
    ((fixed[$1] <= $3 / 2)) || fixed[$1]=$(($3 / 2))
    each[$1]=$((($3 - fixed[$1]) / $2 + 1))
}

# grow NAME: increases the size of the step by half, up to its maximum.
grow() {
    size[$1]=$((size[$1] * 3 / 2))
    ((size[$1] <= most[$1])) || size[$1]=${most[$1]}
}

build_tests() { # build_tests BINARY: builds a test binary once
    [[ -z ${built[$1]:-} ]] || return 0
    built[$1]=1
    step "build $1" cargo test --locked --all-features --no-run --test "$1"
}

# prepare NAME: builds the programs of the step before the first round.
prepare() {
    case $1 in
        oracle | filesystems | power-loss) build_tests storage ;;
        crash) build_tests crash ;;
        sidecar) build_tests api_server ;;
        fuzz)
            fuzz "build $1" 1
            count_step "build $1"
            ((status != 77)) || steps=${steps/fuzz/}
            ;;
    esac
}

end() {
    if ((failed == 0)); then
        rm -rf "$kept"
    else
        printf '\nlogs: %s\n' "$kept"
    fi
    finish
}
trap 'echo interrupted; end || true; cleanup 130' INT
trap 'echo interrupted; end || true; cleanup 143' TERM

label=
round=0
declare -A built=()
limit=$((minutes * 60))
printf 'soak: %d minutes; steps: %s; logs: %s\n' "$minutes" "$steps" "$kept"
for name in $steps; do prepare "$name"; done
((failed == 0)) || end

# A smaller step can fit after one that does not. The rounds end when no step fits.
while :; do
    round=$((round + 1))
    began=$SECONDS passed_before=$passed failed_before=$failed ran=0
    for name in $steps; do
        if soak "$name"; then ran=$((ran + 1)); fi
    done
    ((ran > 0)) || break
    printf 'round %d: %d s, %d passed, %d failed; %d minutes remain\n' "$round" \
        $((SECONDS - began)) $((passed - passed_before)) $((failed - failed_before)) \
        $(($(remaining_ms) / 60000))
done
check_leftovers
end
