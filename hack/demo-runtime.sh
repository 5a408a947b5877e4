#!/usr/bin/env bash
# hack/demo-runtime.sh: a volume that a container runtime mounts and the host does not (KEP-2857), with no cluster: the
# commands of `volume` ask as kubelet does, containerd makes the container. Starts crust_ops and a driver; makes a volume and
# publishes it with its mount deferred; runs a container that writes to it; shows that the host's mounts have nothing of it, that it is
# measured and grows all the same, and that no second container gets it; and takes everything away, with the data still on the
# volume. Leaves nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN  the binary to show; without it, the one of this tree is built
# Needs root, for loop devices and mounts, and containerd with runc.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"

volume=deferred
# Containers, by the names that containerd has for them.
containers=(writer intruder)

ctr() { command ctr --address "$tmp/containerd.sock" "$@"; }

# take_down HOW: takes away what the demo made. OK for what is gone or was never made, so it may be repeated.
take_down() {
    local how=$1 container
    for container in "${containers[@]}"; do
        remove_container "$container"
    done
    "$how" "$driver" volume unpublish "$volume" --target "$tmp/pod/mount" --timeout 30s
    "$how" "$driver" volume unstage "$volume" --staging "$tmp/staging" --timeout 30s
    "$how" "$driver" volume delete "$volume" --timeout 30s
}

remove_container() { # remove_container NAME: ends it and has containerd forget it, if it is there
    [[ -S $tmp/containerd.sock ]] || return 0
    quietly ctr task kill --signal KILL "$1"
    for _ in {1..50}; do
        quietly ctr task delete --force "$1"
        ctr task list --quiet 2>/dev/null | grep -Fx -- "$1" >/dev/null || break
        sleep 0.1
    done
    quietly ctr container delete "$1"
}

# tell_and_run COMMAND...: one that is not of the binary.
tell_and_run() {
    printf '%s    $ %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain"
    "$@" | sed "s|$tmp|\$tmp|g; s/^/    /"
}

await() { # await WHAT COMMAND...: until the command succeeds
    local what=$1 deadline=$((SECONDS + 30))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || die "$what: not within half a minute"
        sleep 0.1
    done
}

start_crust_ops() {
    start crust-ops "$driver" --mode runtime-ops --endpoint "unix://$tmp/crust.sock" --crust-dir "$tmp/crust" \
        --cli-env "CSI_LOOPBACK_RUNC_CONFIG=$tmp/oci-runtime.yaml"
    await crust_ops test -S "$tmp/crust.sock"
}

start_containerd() {
    cat >"$tmp/containerd.toml" <<END
version = 2
root = "$tmp/containerd/root"
state = "$tmp/containerd/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$tmp/containerd.sock"
END
    start containerd containerd --config "$tmp/containerd.toml"
    await containerd ctr version
}

make_root() {
    mkdir -p "$tmp/root/bin"
    cp "$(command -v busybox)" "$tmp/root/bin/"
    for name in sh sleep cat df; do
        ln -s busybox "$tmp/root/bin/$name"
    done
}

run_container() { # run_container NAME SCRIPT: in the background, with the volume at /data, by csi-loopback-runc
    ctr run --detach --rootfs --runc-binary "$tmp/csi-loopback-runc" --env PATH=/bin \
        --mount "type=bind,src=$tmp/pod/mount,dst=/data,options=rbind:rw" "$tmp/root" "$1" sh -c "$2"
}

in_container() { ctr task exec --exec-id "$((++execs))" writer "$@"; }
execs=0

# The host's mounts have nothing of the volume, and its directory stays empty.
unseen() {
    local shown
    shown=$(list_mounts | awk -v at="$tmp/" 'index($1, at) == 1 && $1 ~ "/(pod|staging|work)" { print }')
    [[ -z $shown ]] || die "the host sees it: $shown"
    [[ -z $(ls -A "$tmp/pod/mount") ]] || die "something is in the host's directory"
    printf '    mounted on the host: nothing of it; in %s: nothing\n' "\$tmp/pod/mount"
}

is_root || die "needs root, for loop devices and mounts: sudo $0"
install_missing "${storage_commands[@]}" "${node_commands[@]}" setsid || die "needs what could not be installed"
find_driver
begin_demo "${storage_commands[@]}" "${node_commands[@]}" setsid
# What containerd starts reads this too.
export CSI_LOOPBACK_RUNC_CONFIG=$tmp/oci-runtime.yaml
printf 'crustDir: %s\nworkDir: %s\n' "$tmp/crust" "$tmp/work" >"$CSI_LOOPBACK_RUNC_CONFIG"
# The name selects the mode.
ln -s "$driver" "$tmp/csi-loopback-runc"
mkdir "$tmp/pod"
driver_flags=(--enable-defer-fs-ops --crust-endpoint "unix://$tmp/crust.sock")

say "starting crust_ops, containerd and a driver, with its pool in \$tmp ($tmp)"
start_crust_ops
start_driver
make_root
start_containerd

say "creating a volume that asks for it, staging and publishing it: nothing is mounted"
mode=(--fs xfs --access-mode single-node-single-writer)
show volume create "$volume" --size 320Mi --defer-fs-mount "${mode[@]}"
show volume stage "$volume" --staging "$tmp/staging" "${mode[@]}"
show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/pod/mount" "${mode[@]}"
tell_and_run cat "$tmp"/crust/*/mountInfo.json
echo
unseen
say "nobody has it yet, and that is what is told"
show volume stats "$volume" --path "$tmp/pod/mount"

say "a container by containerd, with csi-loopback-runc in front of runc"
run_container writer 'echo "written in the container" >/data/file; sleep 1000'
await "the file" in_container cat /data/file
tell_and_run in_container df -h /data
unseen
say "it is measured, and grows, while the container runs"
show volume stats "$volume" --path "$tmp/pod/mount"
show volume expand "$volume" --size 512Mi --path "$tmp/pod/mount"
tell_and_run in_container df -h /data
unseen

say "a container of another pod does not get it"
! run_container intruder 'sleep 1000' 2>"$tmp/refusal" || die "it was not refused"
grep -F "another pod" "$tmp/refusal" | sed "s|$tmp|\$tmp|g; s/^/    /" || die "refused, but otherwise: $(<"$tmp/refusal")"

say "the container goes; the data is on the volume, which the host may now mount"
remove_container writer
remove_container intruder
show volume unpublish "$volume" --target "$tmp/pod/mount"
[[ ! -e $tmp/pod/mount && -z $(ls -A "$tmp/crust") ]] || die "something of the publication is left"
device=$(loops_of "$tmp" | awk -v of="vol-$volume-" 'index($2, of) { print $1 }')
mkdir "$tmp/look"
tell_and_run mount -o ro "$device" "$tmp/look"
tell_and_run cat "$tmp/look/file"
umount "$tmp/look"

say "taking everything down"
take_down run
end_demo
