# shellcheck shell=bash disable=SC2034,SC2154
# Scene: a volume that a container's runtime mounts, and the node never does (needs containerd)

run_container() { # run_container NAME SCRIPT: with the volume at /data, by csi-loopback-runc
    ctr run --detach --rootfs --runc-binary "$tmp/csi-loopback-runc" --env PATH=/bin \
        --mount "type=bind,src=$tmp/target,dst=/data,options=rbind:rw" "$tmp/root" "$1" sh -c "$2"
}

in_container() { ctr task exec --exec-id "$SRANDOM" writer "$@"; }

before_clean_up() { # removes the containers, which would outlive containerd
    [[ -S $tmp/containerd.sock ]] || return 0
    for _ in {1..50}; do
        ctr task delete --force writer intruder >/dev/null 2>&1 || true
        [[ -n $(ctr task list --quiet 2>/dev/null) ]] || break
        sleep 0.1
    done
    ctr container delete writer intruder >/dev/null 2>&1 || true
}

check_host() {
    local mounts
    mounts=$(list_mounts | awk -v at="$tmp/" 'index($1, at) == 1 && $1 ~ "/(target|staging|work)"')
    [[ -z $mounts && -z $(ls -A "$tmp/target") ]] || die "the host sees the volume: $mounts"
    echo "    the host: no mount of the volume, and an empty directory"
}

begin "${node_commands[@]}"
say "starting crust_ops, containerd and a driver, with its pool in \$tmp ($tmp)"
# For ctr, and for what containerd starts.
export CONTAINERD_ADDRESS=$tmp/containerd.sock CSI_LOOPBACK_RUNC_CONFIG=$tmp/oci-runtime.yaml
printf '%s\n' "crustDir: $tmp/crust" "workDir: $tmp/work" >"$CSI_LOOPBACK_RUNC_CONFIG"
start_crust_ops "$tmp"
start_driver
# The name selects the mode.
ln -s "$driver" csi-loopback-runc
mkdir -p root/bin
cp "$(command -v busybox)" root/bin
root/bin/busybox --install root/bin
printf '%s\n' 'version = 2' 'disabled_plugins = ["io.containerd.grpc.v1.cri"]' >containerd.toml
start containerd containerd --config containerd.toml --address "$CONTAINERD_ADDRESS" \
    --root "$tmp/containerd/root" --state "$tmp/containerd/state"
await containerd ctr version
say "creating a volume, staging it, and publishing it with defer_fs_ops: nothing is mounted"
mode=(--fs xfs --access-mode single-node-single-writer)
show volume create "$volume" --size 320Mi "${mode[@]}"
show volume stage "$volume" --staging "$tmp/staging" "${mode[@]}"
show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" --defer-fs-ops "${mode[@]}"
shell jq . "$tmp"/crust/*/mountInfo.json
check_host
say "no runtime has it yet, which its condition reports"
show volume stats "$volume" --path "$tmp/target"
say "a container by containerd, with csi-loopback-runc in front of runc"
run_container writer 'echo "written in the container" >/data/file; sleep 1000'
await "the file" in_container cat /data/file
shell in_container df -h /data
check_host
say "statistics and growth, while the container runs"
show volume stats "$volume" --path "$tmp/target"
show volume expand "$volume" --size 512Mi --path "$tmp/target"
shell in_container df -h /data
check_host
say "a container of another pod is refused"
refused "another pod" run_container intruder 'sleep 1000'
say "the container ends; the data is on the volume, which the host may mount now"
before_clean_up
show volume unpublish "$volume" --target "$tmp/target"
[[ ! -e $tmp/target && -z $(ls -A "$tmp/crust") ]] || die "something of the publication is left"
mkdir look
mount -o ro "$(loops_of "$tmp" | awk '/vol-demo-/ { print $1 }')" look
shell cat look/file
umount look
remove_volume
