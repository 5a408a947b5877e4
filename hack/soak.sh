#!/usr/bin/env bash
# hack/soak.sh [MINUTES]: runs the long versions of the tests that look for a missed change or a lost snapshot: the
# oracle, sequences of failures, real filesystems under load, crashes at every fail point, power loss and the fuzz targets, and those of the
# sidecar, in rounds, each with fresh seeds and larger settings, until the time (60 minutes, building included) is
# up.
# A step that the rest of the time is too short for is made smaller or left out.
#
# One line per step and one per round; at the end the line "N passed, N failed, N skipped". Logs and
# whatever a test keeps of a failure (images after a power cut, inputs of fuzz targets) stay in
# target/soak/TIME, which is printed, when something failed, and go when nothing did.
#
# SOAK_STEPS  which steps to run ("oracle failures filesystems crash power-loss fuzz sidecar")
# SOAK_POOL   the kind of pool that oracle and failures run on: reflink, image or copy (all of them)
#
# Needs root. Interrupt it at any time: it takes away what it has made.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/steps.sh
source "$repo/hack/steps.sh"
cd "$repo"

minutes=${1:-60}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || die "not a number of minutes: $minutes"
steps=${SOAK_STEPS:-oracle failures filesystems crash power-loss fuzz sidecar}

# What each step is given: in the first round, at least, at most. Cases, seconds, images; crashes come
# as they are.
declare -A size=([oracle]=20 [failures]=40 [filesystems]=12 [crash]=1 [power-loss]=100 [fuzz]=30 [sidecar]=1)
declare -A least=([oracle]=2 [failures]=2 [filesystems]=3 [crash]=1 [power-loss]=20 [fuzz]=5 [sidecar]=1)
declare -A most=([oracle]=2000 [failures]=5000 [filesystems]=600 [crash]=1 [power-loss]=2000 [fuzz]=1200 [sidecar]=1)
# What it takes, in milliseconds: at least, and for each unit. A guess until it has been run; then
# measured, with what it takes at least in it.
declare -A fixed=([oracle]=5000 [failures]=5000 [filesystems]=60000 [crash]=300000 [power-loss]=20000 [fuzz]=5000 [sidecar]=240000)
declare -A each=([oracle]=6000 [failures]=12000 [filesystems]=15000 [crash]=0 [power-loss]=2000 [fuzz]=9000 [sidecar]=0)
for name in $steps; do
    [[ -n ${size[$name]:-} ]] || die "no such step: $name; there are ${!size[*]}"
done

is_root || die "needs root, for loop devices and mounts"
command -v cargo >/dev/null || die "needs Rust: no cargo in PATH"
install_missing "${storage_commands[@]}" "${load_commands[@]}" || die "needs what could not be installed"

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
kept=$target/soak/$(date --utc +%Y%m%dT%H%M%SZ)
begin 3600 "$kept"
# The tests of this run only: not those of other settings.
unset "${!ORACLE_@}" "${!FILESYSTEMS_@}" "${!CRASH_@}" "${!POWER_LOSS_@}" "${!FUZZ_@}" "${!SIDECAR_@}"

# left_ms: what is left of the time.
left_ms() { echo $((minutes * 60000 - SECONDS * 1000)); }

# fitting NAME: the size that the step is run with in what is left, with a fifth in reserve; 0: none.
fitting() {
    local wanted=${size[$1]} room
    room=$(($(left_ms) * 4 / 5 - fixed[$1]))
    ((room > 0)) || wanted=0
    if ((each[$1] > 0 && wanted * each[$1] > room)); then wanted=$((room / each[$1])); fi
    ((wanted >= least[$1])) || wanted=0
    echo "$wanted"
}

# tests NAME CARGO-ARGUMENT... [-- SETTING...]: runs an integration test with these settings. By cargo:
# it puts the binary with the right features in its place.
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
        fuzz)
            label="fuzz ($2 s for each target)"
            run "fuzz-$round" hack/fuzz.sh "$2"
            ;;
    esac
}

# count NAME: adds up what the step has done.
count() {
    if [[ $1 != fuzz ]]; then
        count_tests_of "round $round, $label"
        return
    fi
    count_fuzz "round $round, $label"
    # Where the fuzzers put the inputs that made them fail.
    if ((status != 0 && status != 77)); then
        cp -r "$target/fuzz/artifacts" "$kept/fuzz-inputs-$round" || true
    fi
}

# soak NAME: one step of a round, if there is time for it. Fails when there was none.
soak() {
    local units began=${EPOCHREALTIME/./} ms due expected failed_before=$failed
    units=$(fitting "$1")
    ((units > 0)) || return 1
    expected=$((fixed[$1] + units * each[$1]))
    # What takes far longer than ever before hangs. And the time that was given is kept.
    due=$((expected * 3 / 1000 + 300))
    limit=$(($(left_ms) / 1000))
    ((limit < due)) || limit=$due
    start "$1" "$units"
    ms=$(((${EPOCHREALTIME/./} - began) / 1000))
    if ((status == 124 && limit < due)); then
        printf 'stopped  %s  %s: the time is up\n' "$took" "$label"
        clear_up_between
        return 1
    fi
    count "$1"
    left_behind
    if [[ -n $left ]]; then
        printf 'FAILED             left behind:\n'
        printf '%s\n' "$left" | sed 's/^/    /'
        fail 1 "round $round, $label: left something behind"
        clear_up_between
    fi
    ((failed > failed_before)) || rm -f "$log"
    if ((status == 0)); then learn "$1" "$units" "$ms"; fi
    grow "$1"
}

# clear_up_between: as at the end, but there is a TMPDIR afterwards.
clear_up_between() {
    clear_up
    mkdir -p "$TMPDIR"
}

# learn NAME SIZE MS: what the step took tells what it will take.
learn() {
    if ((most[$1] == 1)); then
        fixed[$1]=$3
        return
    fi
    ((fixed[$1] <= $3 / 2)) || fixed[$1]=$(($3 / 2))
    each[$1]=$((($3 - fixed[$1]) / $2 + 1))
}

# grow NAME: the next round is larger by half.
grow() {
    size[$1]=$((size[$1] * 3 / 2))
    ((size[$1] <= most[$1])) || size[$1]=${most[$1]}
}

build_tests() { # build_tests BINARY: once for all steps that it is in
    [[ -z ${built[$1]:-} ]] || return 0
    built[$1]=1
    step "build $1" cargo test --locked --all-features --no-run --test "$1"
}

# prepare NAME: builds what the step runs, so that no round pays for it.
prepare() {
    case $1 in
        oracle | filesystems | power-loss) build_tests storage ;;
        crash) build_tests crash ;;
        sidecar) build_tests api_server ;;
        fuzz)
            run "build $1" hack/fuzz.sh 1
            count_fuzz "build $1"
            ((status != 77)) || steps=${steps/fuzz/}
            ;;
    esac
}

end() {
    if ((failed == 0)); then
        rm -rf "$kept"
    else
        printf '\nkept: %s\n' "$kept"
    fi
    finish
}
trap 'echo interrupted; end || true; cleanup 130' INT
trap 'echo interrupted; end || true; cleanup 143' TERM

label=
round=0
declare -A built=()
limit=$((minutes * 60))
printf 'soak: %d minutes of %s; logs in %s\n' "$minutes" "$steps" "$kept"
for name in $steps; do prepare "$name"; done
((failed == 0)) || end

# A step that does not fit may be followed by one that does.
while :; do
    round=$((round + 1))
    began=$SECONDS passed_before=$passed failed_before=$failed ran=0
    for name in $steps; do
        if soak "$name"; then ran=$((ran + 1)); fi
    done
    ((ran > 0)) || break
    printf 'round %d: %d s, %d passed, %d failed; %d minutes left\n' "$round" \
        $((SECONDS - began)) $((passed - passed_before)) $((failed - failed_before)) \
        $(($(left_ms) / 60000))
done
check_left_behind
end
