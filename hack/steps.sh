# shellcheck shell=bash
# Step runner of hack/test.sh and hack/soak.sh. It writes the output of each step to a log, prints
# one result line per step, and counts tests. Steps run in a TMPDIR of this run, which is always
# removed at the end. Mounts, loop devices, processes and files that remain are reported. Source
# this file after lib.sh; do not run it.

# Timeout of a step in seconds; directory of the logs.
limit=3600
logs=

passed=0
failed=0
skipped=0
failures=()
step_pid=
# Output lines of ended phases; the current phase.
phases=()
current_phase=
phase_budget=
phase_started=0
# Process ids of background lanes.
background=()
# How a step is performed, if not at once: "detached", in a background lane, without a result; or "collect",
# which waits for the result of that lane. A lane is a function that is called in both modes.
mode=

begin() { # begin LIMIT LOGS
    limit=$1 logs=$2
    mkdir -p "$logs"
    # Only this run uses it, so that everything in it belongs to a test. Short: the path of a unix
    # socket has at most 107 bytes.
    TMPDIR=$(mktemp -d /tmp/csi-loopback-test.XXXXXX)
    export TMPDIR
    list_loops | sort >"$logs/loops-before"
    list_mounts | sort >"$logs/mounts-before"
    # Each trap calls cleanup: an `exit` in a signal trap can end the EXIT trap before its first
    # command.
    trap 'cleanup $?' EXIT
    trap 'cleanup 130' INT
    trap 'cleanup 143' TERM
}

cleanup() { # cleanup STATUS: stops all processes of the run, removes its files, and exits with STATUS
    # A second interrupt must not stop the cleanup.
    trap '' INT TERM
    trap - EXIT
    set +e
    stop_step
    if ((${#background[@]})); then
        kill -TERM "${background[@]}" 2>/dev/null || true
        wait "${background[@]}" 2>/dev/null || true
    fi
    clear_up
    exit "$1"
}

stop_step() {
    [[ -n $step_pid ]] || return 0
    # `timeout` forwards the signal to its process group.
    kill -TERM "$step_pid" 2>/dev/null || true
    wait "$step_pid" 2>/dev/null || true
}

# clear_up: kills the processes of this run and removes its TMPDIR.
clear_up() {
    local pid
    while read -r pid _; do
        kill -KILL "$pid" 2>/dev/null || true
    done < <(processes_of "$TMPDIR")
    clear_directory "$TMPDIR" || true
}

# phase [NAME BUDGET]: ends the current phase, and starts another one with a budget in seconds.
phase() {
    local took=$((SECONDS - phase_started))
    [[ -z $current_phase ]] || phases+=("$(phase_line "$took" "$phase_budget" "$current_phase")")
    current_phase=${1:-} phase_budget=${2:-} phase_started=$SECONDS
}

phase_line() { # phase_line SECONDS BUDGET NAME
    printf '  %5d s of %4d s  %s' "$1" "$2" "$3"
    (($1 <= $2)) || printf ': BUDGET EXCEEDED by %d s' $(($1 - $2))
    printf '\n'
}

# print_phases BUDGET: prints the time and budget of each phase, and the total time with BUDGET.
print_phases() {
    printf '\nPhases:\n'
    printf '%s\n' "${phases[@]}"
    phase_line "$SECONDS" "$1" "total"
}

fail() { # fail COUNT NAME [LOG]: counts failed tests; the end of the output repeats NAME, and LOG's evidence
    [[ $mode != detached ]] || return 0
    failed=$((failed + $1))
    failures+=("$2${3:+$'\n'$(evidence "$3")}")
}

# evidence LOG: what failed, in a few short lines: a reader may have only the end of the output.
evidence() {
    local lines
    lines=$(panics "$1")
    [[ -n $lines ]] || lines=$(grep --text -A 2 -E '^failed: |FAILED|no success within' "$1" | grep -v '^--$')
    [[ -n $lines ]] || lines=$(tail -n 8 "$1")
    cut -c 1-400 <<<"$lines" | sed -n 's/^/      /; 1,16p'
}

# panics LOG: each place of a panic once: the first test, the message, and how many tests failed there.
panics() {
    awk '
        /^thread .* panicked at / {
            place = $NF; test = $0; sub(/ \([0-9]+\) panicked at .*| panicked at .*/, "", test)
            if (!seen[place]++) { order[++places] = place; first[place] = test; open = place; lines = 0 }
            next
        }
        open && lines < 3 && NF && !/^(note: |stack backtrace:)/ { message[open] = message[open] " " $0; lines++; next }
        { open = "" }
        END {
            for (i = 1; i <= places; i++) {
                place = order[i]
                printf "%s at %s%s%s\n", first[place], place, message[place], (seen[place] > 1 ? " (" seen[place] " times)" : "")
            }
        }' "$1"
}

skip() { # skip COUNT NAME REASON
    [[ $mode != detached ]] || return 0
    if [[ ${CI:-} == true ]]; then
        printf 'FAILED             %s: %s (skips are failures with CI=true)\n' "$2" "$3"
        fail "$1" "$2: $3"
    else
        printf 'SKIPPED            %s: %s\n' "$2" "$3"
        skipped=$((skipped + $1))
    fi
}

log_of() { printf '%s/%s.log\n' "$logs" "${1//[^A-Za-z0-9_-]/-}"; }

# run NAME COMMAND...: runs the command with its output in the log of NAME. Sets log, status and
# took.
run() {
    local started=${EPOCHREALTIME/./} ms
    log=$(log_of "$1")
    shift
    status=0
    # In the background: bash handles a signal during `wait`, but not during a foreground command.
    timeout --kill-after=60 "$limit" "$@" >"$log" 2>&1 &
    step_pid=$!
    wait "$step_pid" || status=$?
    step_pid=
    ms=$(((${EPOCHREALTIME/./} - started) / 1000))
    printf -v took '%4d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
    ((status != 124)) || echo "timed out after $limit s" >>"$log"
}

# run_in_background FUNCTION ARGUMENT...: starts a function that calls `run`, in parallel to the
# next steps.
run_in_background() {
    (
        trap - EXIT INT
        trap 'stop_step; exit 143' TERM
        "$@"
    ) &
    background+=("$!")
}

# run_detached NAME COMMAND...: `run` in a background lane. It stores the result for `collect`.
run_detached() {
    run "$@"
    printf '%s\t%s\n' "$status" "$took" >"$log.new"
    mv "$log.new" "$log.ended"
}

# collect NAME: waits until a background lane has run the step NAME. Sets log, status and took like
# `run`.
collect() {
    log=$(log_of "$1")
    while [[ ! -e $log.ended ]]; do
        # The lane can store the result just before it ends: check the file again.
        if ! kill -0 "${background[@]}" 2>/dev/null && [[ ! -e $log.ended ]]; then
            echo "the background lanes ended before this step" >>"$log"
            status=1 took='   0.0 s'
            return
        fi
        sleep 0.2
    done
    IFS=$'\t' read -r status took <"$log.ended"
}

# perform NAME COMMAND...: runs the command, or collects its result, by the mode. Fails if there is no
# result to count.
perform() {
    case $mode in
        detached) run_detached "$@" && return 1 ;;
        collect) collect "$1" ;;
        *) run "$@" ;;
    esac
}

print_result() { # print_result NAME DETAIL [LINES]: prints the result of the last step, on failure with its last LINES
    if ((status == 0)); then
        printf 'ok       %s  %s%s\n' "$took" "$1" "$2"
    else
        printf 'FAILED   %s  %s%s (exit %d, %s)\n' "$took" "$1" "$2" "$status" "$log"
        tail -n "${3:-80}" "$log" | sed 's/^/    /'
    fi
}

step() { # step NAME COMMAND...: performs the command and counts it as one test
    perform "$@" || return 0
    count_step "$1"
}

# count_step NAME: counts the last step as one test. Exit code 77 means that the machine lacks what the
# last line of the output names.
count_step() {
    if ((status == 77)); then
        skip 1 "$1" "$(tail -n 1 "$log")"
        return
    fi
    print_result "$1" ""
    if ((status == 0)); then passed=$((passed + 1)); else fail 1 "$1" "$log"; fi
}

# run_tests NAME COMMAND...: performs a test binary and counts its tests.
run_tests() {
    perform "$@" || return 0
    count_tests "$1"
}

# count_tests NAME: counts the tests in the log of the last step. The line "SKIPPED: NAME: REASON"
# marks a test that cannot run on this machine. Lines that start with "report: " are printed.
count_tests() {
    local name=$1 ok=0 bad=0 ignored=0 detail='' skips line
    while read -r line; do
        [[ $line =~ ([0-9]+)\ passed\;\ ([0-9]+)\ failed\;\ ([0-9]+)\ ignored ]] || continue
        ok=$((ok + BASH_REMATCH[1]))
        bad=$((bad + BASH_REMATCH[2]))
        ignored=$((ignored + BASH_REMATCH[3]))
    done < <(grep '^test result:' "$log")
    mapfile -t skips < <(sed -n 's/^SKIPPED: //p' "$log")
    ok=$((ok - ${#skips[@]}))
    passed=$((passed + ok))
    if ((bad > 0)); then
        fail "$bad" "$name: $bad failed" "$log"
    elif ((status != 0)); then
        fail 1 "$name: exit $status" "$log"
    fi
    ((ignored == 0)) || detail=", $ignored only in the full tier"
    print_result "$name" ": $ok passed, $bad failed, ${#skips[@]} skipped$detail" 200
    sed -n 's/^report: /             report: /p' "$log"
    for line in "${skips[@]}"; do
        skip 1 "${line%%: *}" "${line#*: }"
    done
}

# find_leftovers: sets leftovers to the mounts, loop devices, processes and files of this run, one
# per line. Sets elsewhere to mounts and loop devices that appeared since the start outside of
# TMPDIR; these can belong to another user of the machine.
find_leftovers() {
    local processes
    # The kernel releases a loop device a moment after its last user.
    for _ in {1..50}; do
        # Not in the subshell below: processes_of would report the subshell.
        processes=$(processes_of "$TMPDIR")
        leftovers=$(
            mounts_below "$TMPDIR" | sed 's/^/mount /'
            loops_of "$TMPDIR" | sed 's/^/loop device /'
            [[ -z $processes ]] || printf 'process %s\n' "${processes//$'\n'/$'\nprocess '}"
            find "$TMPDIR" -xdev -mindepth 1 -maxdepth 2 | sed 's/^/file /; 20q'
        ) || true
        elsewhere=$(
            list_loops | sort | comm -13 "$logs/loops-before" - | grep -vF " $TMPDIR/" | sed 's/^/loop device /'
            list_mounts | sort | comm -13 "$logs/mounts-before" - | grep -vF "$TMPDIR/" | sed 's/^/mount /'
        ) || true
        # Wait for changes elsewhere only in CI, where the machine has no other users.
        [[ -n $leftovers || (${CI:-} == true && -n $elsewhere) ]] || return 0
        sleep 0.2
    done
}

# check_leftovers: counts as one test. It fails if anything of this run remains, in CI also for
# changes elsewhere.
check_leftovers() {
    find_leftovers
    if [[ ${CI:-} == true && -n $elsewhere ]]; then
        leftovers+=${leftovers:+$'\n'}$elsewhere
    elif [[ -n $elsewhere ]]; then
        printf 'note: new since the start, perhaps of another program:\n'
        printf '%s\n' "$elsewhere" | sed 's/^/    /'
    fi
    if [[ -z $leftovers ]]; then
        printf 'ok                 no mount, loop device, process or file remains\n'
        passed=$((passed + 1))
    else
        print_leftovers
        fail 1 "remaining mounts, loop devices, processes or files:"$'\n'"$(sed -n 's/^/      /; 1,8p' <<<"$leftovers")"
    fi
}

print_leftovers() {
    printf 'FAILED             remaining mounts, loop devices, processes or files:\n'
    printf '%s\n' "$leftovers" | sed 's/^/    /'
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
