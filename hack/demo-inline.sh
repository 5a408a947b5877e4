#!/usr/bin/env bash
# hack/demo-inline.sh: volumes that are declared in pods (KEP-596), with no cluster: `volume inline` asks as kubelet does.
# Starts a driver with its pool in a temporary directory; makes a scratch volume, kills the driver under it and shows that it
# goes on; makes a volume of a setting and a secret, and swaps the secret while somebody reads it; shows what is refused;
# and takes everything away. Leaves nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN  the binary to show; without it, the one of this tree is built
# Needs root, for loop devices and mounts.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"

# The volumes, by the handles that kubelet would make of the pod's uid and the volume's name.
volumes=(pod1-scratch pod1-settings pod2-scratch)
# So much of the node, and no more, is for them.
driver_flags=(--inline-max-size 256Mi --inline-max-volumes 3)
# Where the reader of a secret notes what it has read, and by what it is told to end.
readings=
finish=

target() { printf '%s/pods/%s/mount' "$tmp" "${1/-//}"; }

# take_down HOW: takes away what the demo made. OK for what is gone or was never made, so it may be repeated.
take_down() {
    local how=$1 volume
    [[ -z $finish ]] || touch "$finish"
    for volume in "${volumes[@]}"; do
        "$how" "$driver" volume inline unpublish "$volume" --target "$(target "$volume")" --timeout 30s
    done
}

publish() { # publish VOLUME ARGUMENT...
    local volume=$1
    shift
    show volume inline publish "$volume" --target "$(target "$volume")" "$@"
}

refused() { # refused WORDS COMMAND...: a command that has to fail, with these words
    local words=$1
    shift
    ! "$@" 2>"$tmp/refusal" || die "it was not refused"
    sed 's/^/    /' "$tmp/refusal"
    grep -F -- "$words" "$tmp/refusal" >/dev/null || die "refused, but not with: $words"
}

# tell_and_run COMMAND...: one that is not of the binary.
tell_and_run() {
    printf '%s    $ %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain"
    "$@" | sed "s|$tmp|\$tmp|g; s/^/    /"
}

kill_driver() {
    kill -KILL -- "-$driver_pid"
    wait "$driver_pid" 2>/dev/null || true
}

# read_on FILE: reads it until it is told to end, and notes what there was besides one of the two secrets.
read_on() {
    local word count=0
    while [[ -d $tmp && ! -e $finish ]]; do
        word=$(<"$1") || word="no file"
        [[ $word == monday || $word == tuesday ]] || printf '%s\n' "$word" >>"$readings"
        count=$((count + 1))
    done
    printf '%d\n' "$count" >"$finish.count"
}

begin_demo "${storage_commands[@]}" setsid

say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver

say "a pod's scratch volume: one call makes, formats, attaches and mounts it"
publish pod1-scratch --attribute size=64Mi
printf 'written by the pod\n' >"$(target pod1-scratch)/file"
show volume inline stats pod1-scratch --target "$(target pod1-scratch)"
say "it is no volume for the rest of CSI"
show volume list

say "the driver dies; the pod writes on"
kill_driver
printf 'written with no driver\n' >>"$(target pod1-scratch)/file"
start_driver
say "kubelet repeats its call, which finds everything in place"
publish pod1-scratch --attribute size=64Mi
tell_and_run cat "$(target pod1-scratch)/file"

say "a setting and a secret as files, in memory: to the pod they are read-only, so this has to be said"
printf monday >"$tmp/secret"
settings=(--attribute content/app.conf=colour=blue --attribute medium=Memory --secret "token=$tmp/secret")
refused "readonly" publish pod1-settings "${settings[@]}"
publish pod1-settings --read-only "${settings[@]}"
tell_and_run ls "$(target pod1-settings)"

say "the secret changes, and kubelet repeats its call: it is swapped under who reads it"
readings=$tmp/readings finish=$tmp/finish
read_on "$(target pod1-settings)/token" &
reader=$!
tell_and_run cat "$(target pod1-settings)/token"
echo
printf tuesday >"$tmp/secret"
publish pod1-settings --read-only "${settings[@]}"
tell_and_run cat "$(target pod1-settings)/token"
echo
touch "$finish"
wait "$reader"
[[ ! -s $readings ]] || die "something else was read: $(sort -u "$readings")"
printf '    read %d times meanwhile: always one of the two, and whole\n' "$(<"$finish.count")"

say "what is too large, too many, or out of reach is refused"
refused "--inline-max-size" publish pod2-scratch --attribute size=1Gi
refused "--inline-from-snapshot" publish pod2-scratch --attribute fromSnapshot=snap-a-0123456789abcdef
refused "colour" publish pod2-scratch --attribute colour=red
publish pod2-scratch --attribute size=64Mi
refused "--inline-max-volumes" show volume inline publish pod3 --target "$tmp/pods/pod3/mount"

say "taking everything down: unpublished is deleted; once more is as well"
take_down run
take_down quietly
kill_driver
show pool check --data-dir "$tmp/data"
end_demo
