#!/usr/bin/env bash
# hack/demo.sh: the driver's main job on real data. Starts a driver with its pool in a temporary
# directory, fills a volume, cuts a snapshot, edits, deletes and trims, cuts another, shows which
# blocks are allocated and which changed, and proves by bytes that the answer is true. Leaves
# nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN  the binary to show; without it, the one of this tree is built
# Needs root, for loop devices and mounts.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"

# What is copied into the volume, in bytes, at most.
tree_bytes=$((100 << 20))
volume=demo

tmp=
driver=
driver_pid=
child_pid=
bold='' dim='' plain=''
if [[ -t 1 ]]; then
    bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi

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

# take_down HOW: takes away what the demo made, as its user would. Each call does nothing where nothing is to be
# done, so it may be repeated, and begun wherever the demo ended.
take_down() {
    local how=$1 snapshot
    "$how" "$driver" volume unpublish "$volume" --target "$tmp/target" --timeout 30s
    "$how" "$driver" volume unstage "$volume" --staging "$tmp/staging" --timeout 30s
    for snapshot in A B; do
        "$how" "$driver" snapshot delete "$snapshot" --timeout 30s
    done
    "$how" "$driver" volume delete "$volume" --timeout 30s
}

quietly() { "$@" >/dev/null 2>&1 || true; }

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    local status=$1 dir=$tmp left
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM HUP PIPE
    trap - EXIT
    set +e
    # A verification that is under way takes its own volumes away.
    [[ -z $child_pid ]] || stop "$child_pid" 70
    [[ -n $dir ]] || exit "$status"
    say "interrupted or failed: cleaning up"
    if [[ -n $driver_pid ]] && kill -0 "$driver_pid" 2>/dev/null; then
        take_down quietly
        stop "$driver_pid" 30
    fi
    if ((status != 0 && status < 128)) && [[ -s $dir/driver.log ]]; then
        echo "    last lines of the driver's log:"
        tail -n 20 "$dir/driver.log" | sed 's/^/    /'
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
        run env --chdir="$repo" cargo build --locked || die "it does not build"
        driver=$(cd "$repo" && realpath "${CARGO_TARGET_DIR:-target}")/debug/csi-loopback
    fi
    driver=$(realpath "$driver")
    [[ -x $driver ]] || die "no binary at $driver"
}

start_driver() {
    local deadline=$((SECONDS + 60))
    # A session of its own, as in run: the clean-up still needs the driver.
    setsid "$driver" --mode driver --endpoint "$CSI_ENDPOINT" --data-dir "$tmp/data" --pool auto \
        >"$tmp/driver.log" 2>&1 </dev/null &
    driver_pid=$!
    until "$driver" volume list --timeout 5s >/dev/null 2>&1; do
        kill -0 "$driver_pid" 2>/dev/null || die "the driver did not start"
        ((SECONDS < deadline)) || die "the driver did not answer within a minute"
        sleep 0.1
    done
}

# Copies real files into the volume; sets files, to what was copied, and copied, in bytes.
copy_tree() {
    local size file sources=()
    for file in "$repo/src" "$repo/docs" "${CARGO_HOME:-$HOME/.cargo}/registry/src" /usr/share/doc \
        /usr/share; do
        [[ ! -d $file ]] || sources+=("$file")
    done
    files=()
    copied=0
    while IFS=$'\t' read -r -d '' size file; do
        ((copied + size <= tree_bytes)) || break
        files+=("$file")
        copied=$((copied + size))
    done < <(find "${sources[@]}" -xdev -type f -size -4M -printf '%s\t%p\0' 2>/dev/null || true)
    ((${#files[@]})) || die "found no files to copy"
    printf '%s\0' "${files[@]}" | xargs -0 cp --parents --preserve=timestamps -t "$tmp/target"
    sync -f "$tmp/target"
}

# Edits, deletes and adds files, then gives the freed blocks back; sets edited and deleted.
change_tree() {
    local index
    edited=0
    deleted=0
    for ((index = 0; index < ${#files[@]}; index++)); do
        if ((index % 7 == 3)); then
            rm -f "$tmp/target${files[index]}"
            deleted=$((deleted + 1))
        elif ((index % 40 == 0)); then
            printf 'edited by the demo\n' >>"$tmp/target${files[index]}"
            edited=$((edited + 1))
        fi
    done
    head -c $((4 << 20)) /dev/urandom >"$tmp/target/new-file"
    sync -f "$tmp/target"
    fstrim "$tmp/target"
}

is_root || die "needs root, for loop devices and mounts: sudo $0"
install_missing "${storage_commands[@]}" setsid || die "needs what could not be installed"
find_driver

tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-loopback-demo.XXXXXX")
# All that is started from here on keeps its files below, and is known by it.
export TMPDIR=$tmp
export CSI_ENDPOINT=unix://$tmp/csi.sock
cd "$tmp"

say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver

say "creating a volume, staging and publishing it"
show volume create "$volume" --size 1Gi --fs ext4
show volume stage "$volume" --staging "$tmp/staging" --fs ext4
show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" --fs ext4

say "copying a directory tree into it"
copy_tree
printf '    %d files, %d MiB\n' "${#files[@]}" $((copied >> 20))

say "cutting snapshot A"
show snapshot create A --volume "$volume"

say "editing, deleting, adding and trimming"
change_tree
printf '    %d files edited, %d deleted, 4 MiB added, fstrim\n' "$edited" "$deleted"

say "cutting snapshot B"
show snapshot create B --volume "$volume"
show volume list
show snapshot list

say "which blocks hold data in A?"
show snapshot allocated A --limit-rows 5

say "which blocks changed from A to B?"
show snapshot delta A B --limit-rows 5

say "is that true? Comparing every byte of both"
show snapshot verify A B

say "taking everything down"
take_down run
stop "$driver_pid" 30
driver_pid=
left=$(in_use "$tmp")
[[ -z $left ]] || die "still in use: $left"
clear_directory "$tmp"
[[ ! -e $tmp ]] || die "still there: $tmp"
tmp=
say "done: no mount, loop device, process or file is left"
