# shellcheck shell=bash
# What the demonstrations (hack/demo*.sh) have in common: commands that are told before they are run, what
# runs beside them, and a clean-up that comes whatever happens. A demonstration defines `take_down HOW`, which
# takes away through the driver what it has made, each command run by HOW.
# Sourced after lib.sh, never run.

tmp=
driver=
driver_pid=
# Of the driver, besides those that all demonstrations give it.
driver_flags=()
# What was started, and the name of each by its process.
started=
running=()
declare -A name_of=()
child_pid=
bold='' dim='' plain=''
if [[ -t 1 ]]; then
    bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi

# Where a trap speaks that has come while a function's output goes elsewhere.
exec {screen}>&1 {errors}>&2

say() { printf '%s==> %s%s\n' "$bold" "$*" "$plain"; }

# run COMMAND...: in the background, so that a signal to this script is heard while it runs, and in a
# session of its own, so that an interrupt from the terminal reaches this script alone, which then
# ends what is running in the right order.
run() {
    local status=0
    setsid "$@" &
    child_pid=$!
    wait "$child_pid" || status=$?
    child_pid=
    return "$status"
}

# show ARGUMENT...: a command of the binary, told before it is run.
show() {
    printf '%s    $ csi-loopback %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain"
    run "$driver" "$@"
}

stop() { # stop PID SECONDS: asks the process and those that it started to end, then makes it
    local deadline=$((SECONDS + $2))
    # Until it has a session of its own, it has no group of its own.
    kill -TERM -- "-$1" 2>/dev/null || kill -TERM "$1" 2>/dev/null || return 0
    # What stands still hears it only when it goes on.
    kill -CONT -- "-$1" 2>/dev/null || true
    while kill -0 "$1" 2>/dev/null; do
        if ((SECONDS >= deadline)); then
            kill -KILL "$1" 2>/dev/null || true
            break
        fi
        sleep 0.1
    done
    wait "$1" 2>/dev/null || true
}

# in_use DIR: processes, mounts and loop devices of this run, a line each, that are still there once
# the kernel has let go, which for a loop device is a moment after its last user.
in_use() {
    local left processes
    for _ in {1..50}; do
        processes=$(processes_of "$1")
        left=$(
            [[ -z $processes ]] || printf 'process %s\n' "${processes//$'\n'/$'\nprocess '}"
            mounts_below "$1" | sed 's/^/mount /'
            loops_of "$1" | sed 's/^/loop device /'
        )
        [[ -n $left ]] || return 0
        sleep 0.1
    done
    printf '%s\n' "$left"
}

# start NAME COMMAND...: beside what follows, with its output in $tmp/NAME.log and in a session of its own, as
# in run: the clean-up may still need it. Sets started to its process.
start() {
    local name=$1
    shift
    setsid "$@" >"$tmp/$name.log" 2>&1 </dev/null {screen}>&- {errors}>&- &
    started=$!
    running+=("$started")
    name_of[$started]=$name
}

# stop_all: ends what was started, the last one first.
stop_all() {
    local index
    for ((index = ${#running[@]} - 1; index >= 0; index--)); do
        stop "${running[index]}" 30
    done
    running=()
    driver_pid=
}

tell_logs() {
    local pid log
    for pid in "${!name_of[@]}"; do
        log=$tmp/${name_of[$pid]}.log
        [[ -s $log ]] || continue
        echo "    last lines of the log of ${name_of[$pid]}:"
        tail -n 20 "$log" | sed 's/^/    /'
    done
}

quietly() { "$@" >/dev/null 2>&1 || true; }

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    local status=$1 dir=$tmp left
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM HUP PIPE
    trap - EXIT
    set +e
    exec 1>&"$screen" 2>&"$errors"
    # A verification that is under way takes its own volumes away.
    [[ -z $child_pid ]] || stop "$child_pid" 70
    if [[ -z $dir ]]; then
        # Before anything was made, or after its end: who has interrupted it hears of that too.
        ((status < 128)) || say "cleaned up: no mount, loop device, process or file is left"
        exit "$status"
    fi
    say "interrupted or failed: cleaning up"
    if [[ -n $driver_pid ]] && kill -0 "$driver_pid" 2>/dev/null; then
        take_down quietly
    fi
    stop_all
    if ((status != 0 && status < 128)); then
        tell_logs
    fi
    # Whatever a driver that died has left.
    clear_directory "$dir"
    unset TMPDIR
    left=$(in_use "$dir")
    [[ ! -e $dir ]] || left+=$'\n'"directory $dir"
    if [[ -n $left ]]; then
        printf 'left behind:\n%s\n' "$left" >&2
    else
        say "cleaned up: no mount, loop device, process or file is left"
    fi
    exit "$status"
}

# Signals call the clean-up themselves: an interrupt that also made a command fail, and so has begun
# the trap of the exit already, would end that trap with an `exit` before its first command.
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM
trap 'cleanup 129' HUP
trap 'cleanup 141' PIPE

find_driver() {
    driver=${CSI_LOOPBACK_BIN:-}
    if [[ -z $driver ]]; then
        command -v cargo >/dev/null || die "needs Rust: no cargo in PATH"
        install_missing gcc || die "needs a C compiler"
        say "building csi-loopback"
        # shellcheck disable=SC2154 # lib.sh sets it
        run env --chdir="$repo" cargo build --locked || die "it does not build"
        driver=$(cd "$repo" && realpath "${CARGO_TARGET_DIR:-target}")/debug/csi-loopback
    fi
    driver=$(realpath "$driver")
    [[ -x $driver ]] || die "no binary at $driver"
}

start_driver() {
    local deadline=$((SECONDS + 60))
    start driver "$driver" --mode driver --endpoint "$CSI_ENDPOINT" --data-dir "$tmp/data" --pool auto \
        "${driver_flags[@]}"
    driver_pid=$started
    until "$driver" volume list --timeout 5s >/dev/null 2>&1; do
        kill -0 "$driver_pid" 2>/dev/null || die "the driver did not start"
        ((SECONDS < deadline)) || die "the driver did not answer within a minute"
        sleep 0.1
    done
}

# begin_demo COMMAND...: sees to it that there are root, these commands and the binary, and sets tmp to a new directory.
# All that is started from here on keeps its files below, and is known by it.
begin_demo() {
    is_root || die "needs root: sudo $0"
    install_missing "$@" || die "needs what could not be installed"
    find_driver
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-loopback-demo.XXXXXX")
    export TMPDIR=$tmp
    export CSI_ENDPOINT=unix://$tmp/csi.sock
    cd "$tmp" || exit
}

# end_demo: ends what is running and fails for what is left.
end_demo() {
    local left
    stop_all
    left=$(in_use "$tmp")
    [[ -z $left ]] || die "still in use: $left"
    clear_directory "$tmp"
    [[ ! -e $tmp ]] || die "still there: $tmp"
    tmp=
    say "done: no mount, loop device, process or file is left"
}
