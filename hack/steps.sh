# shellcheck shell=bash
# How hack/test.sh and hack/soak.sh run their steps: each with its output in a log, one line about it,
# and its tests counted; in a TMPDIR of its own, which is cleared whatever happens; and how to tell
# what was left behind.
# Sourced after lib.sh, never run.

# Seconds that a step may take; the directory for the logs of steps.
limit=3600
logs=

passed=0
failed=0
skipped=0
failures=()
step_pid=
# A line for each phase that has ended; the phase that is under way.
phases=()
current_phase=
phase_budget=
phase_started=0
# What runs beside the steps.
beside=()

begin() { # begin LIMIT LOGS
    limit=$1 logs=$2
    mkdir -p "$logs"
    # Of its own, so that whatever is left in it was left by a test; short, because a socket's path has
    # room for 107 bytes.
    TMPDIR=$(mktemp -d /tmp/csi-loopback-test.XXXXXX)
    export TMPDIR
    list_loops | sort >"$logs/loops-before"
    list_mounts | sort >"$logs/mounts-before"
    # Each trap does it by itself: an `exit` from a signal's trap could end that of the exit before its
    # first command.
    trap 'cleanup $?' EXIT
    trap 'cleanup 130' INT
    trap 'cleanup 143' TERM
}

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM
    trap - EXIT
    set +e
    stop_step
    if ((${#beside[@]})); then
        kill -TERM "${beside[@]}" 2>/dev/null || true
        wait "${beside[@]}" 2>/dev/null || true
    fi
    clear_up
    exit "$1"
}

stop_step() {
    [[ -n $step_pid ]] || return 0
    # To `timeout`, which passes it on to all that it started.
    kill -TERM "$step_pid" 2>/dev/null || true
    wait "$step_pid" 2>/dev/null || true
}

# clear_up: ends the processes of this run and removes its TMPDIR.
clear_up() {
    local pid
    while read -r pid _; do
        kill -KILL "$pid" 2>/dev/null || true
    done < <(processes_of "$TMPDIR")
    clear_directory "$TMPDIR" || true
}

# phase [NAME BUDGET]: ends the phase that is under way, and starts one, which is to take so many seconds at most.
phase() {
    local took=$((SECONDS - phase_started))
    [[ -z $current_phase ]] || phases+=("$(beside_budget "$took" "$phase_budget" "$current_phase")")
    current_phase=${1:-} phase_budget=${2:-} phase_started=$SECONDS
}

beside_budget() { # beside_budget SECONDS BUDGET WHAT
    printf '  %5d s of %4d s  %s' "$1" "$2" "$3"
    (($1 <= $2)) || printf ': BUDGET EXCEEDED by %d s' $(($1 - $2))
    printf '\n'
}

# tell_phases BUDGET: the time of each phase, and that of all of them, beside the budgets.
tell_phases() {
    printf '\nPhases:\n'
    printf '%s\n' "${phases[@]}"
    beside_budget "$SECONDS" "$1" "in all"
}

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

log_of() { printf '%s/%s.log\n' "$logs" "${1//[^A-Za-z0-9_-]/-}"; }

# run NAME COMMAND...: runs it with its output in the log of that name; sets log, status and took.
run() {
    local started=${EPOCHREALTIME/./} ms
    log=$(log_of "$1")
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

# run_beside FUNCTION ARGUMENT...: begins `run`, or what calls it, beside the steps that follow.
run_beside() {
    (
        trap - EXIT INT
        trap 'stop_step; exit 143' TERM
        "$@"
    ) &
    beside+=("$!")
}

# run_and_leave NAME COMMAND...: run, by what runs beside; what became of it is left for `take`.
run_and_leave() {
    run "$@"
    printf '%s\t%s\n' "$status" "$took" >"$log.new"
    mv "$log.new" "$log.ended"
}

# take NAME: waits for what was begun beside last to run and leave the step of this name; sets log, status and took as run does.
take() {
    log=$(log_of "$1")
    while [[ ! -e $log.ended ]]; do
        # It may have been left just before it ended.
        if ! kill -0 "${beside[-1]}" 2>/dev/null && [[ ! -e $log.ended ]]; then
            echo "what ran beside has ended without it" >>"$log"
            status=1 took='   0.0 s'
            return
        fi
        sleep 0.2
    done
    IFS=$'\t' read -r status took <"$log.ended"
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

# run_tests NAME COMMAND...: runs a test binary and adds up what it reports.
run_tests() {
    run "$@"
    count_tests_of "$1"
}

# take_tests NAME: the same for one that was run and left.
take_tests() {
    take "$1"
    count_tests_of "$1"
}

# count_tests_of NAME: adds up what the tests that were just run report. A test that finds the machine
# lacking something prints a line "SKIPPED: what: why", and is then counted as skipped; what it prints
# behind "report: " is shown.
count_tests_of() {
    local name=$1 ok=0 bad=0 ignored=0 left='' lacking line
    while read -r line; do
        [[ $line =~ ([0-9]+)\ passed\;\ ([0-9]+)\ failed\;\ ([0-9]+)\ ignored ]] || continue
        ok=$((ok + BASH_REMATCH[1]))
        bad=$((bad + BASH_REMATCH[2]))
        ignored=$((ignored + BASH_REMATCH[3]))
    done < <(grep '^test result:' "$log")
    mapfile -t lacking < <(sed -n 's/^SKIPPED: //p' "$log")
    ok=$((ok - ${#lacking[@]}))
    passed=$((passed + ok))
    if ((bad > 0)); then
        fail "$bad" "$name: $bad failed"
    elif ((status != 0)); then
        fail 1 "$name: exit $status"
    fi
    ((ignored == 0)) || left=", $ignored in the full tier alone"
    tell "$name" ": $ok passed, $bad failed, ${#lacking[@]} skipped$left" 200
    sed -n 's/^report: /             report: /p' "$log"
    for line in "${lacking[@]}"; do
        skip 1 "${line%%: *}" "${line#*: }"
    done
}

# count_fuzz NAME: adds up the fuzz targets that were just run, each of which is a test.
count_fuzz() {
    local bad
    if ((status == 77)); then
        skip 1 "$1" "$(tail -n 1 "$log")"
        return
    fi
    passed=$((passed + $(grep -c '^ok ' "$log" || true)))
    bad=$(grep -c '^FAILED ' "$log" || true)
    ((bad > 0 || status == 0)) || bad=1
    ((bad == 0)) || fail "$bad" "$1: $bad targets"
    tell "$1" "" 200
    ((status != 0)) || sed -n 's/^ok /             &/p' "$log"
}

# left_behind: sets left to what this run has left behind, line by line, and elsewhere to what is new
# since the start and not below TMPDIR, so perhaps another's who works on this machine.
left_behind() {
    local processes
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
        elsewhere=$(
            list_loops | sort | comm -13 "$logs/loops-before" - | grep -vF " $TMPDIR/" | sed 's/^/loop device /'
            list_mounts | sort | comm -13 "$logs/mounts-before" - | grep -vF "$TMPDIR/" | sed 's/^/mount /'
        ) || true
        # What others do is not waited for, unless nobody else is there.
        [[ -n $left || (${CI:-} == true && -n $elsewhere) ]] || return 0
        sleep 0.2
    done
}

# check_left_behind: counts as one, and fails for what is left; in a continuous build for anything new.
check_left_behind() {
    left_behind
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
}

finish() {
    if ((${#failures[@]})); then
        printf '\nFailed:\n'
        printf '  %s\n' "${failures[@]}"
    fi
    printf '\n'
    printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    ((failed == 0))
}
