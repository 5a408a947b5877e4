# shellcheck shell=bash disable=SC2034,SC2154
# Scene: a volume that the container runtime mounts, not the host (needs containerd)

run_container() { # run_container NAME SCRIPT: runs a container with the volume at /data, with csi-loopback-runc
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
    [[ $mounts == "$tmp/target csi-loopback-deferred-volume" ]] || die "expected only a guard on the host: $mounts"
    [[ $(ls -A "$tmp/target") == THIS-IS-NOT-THE-VOLUME ]] || die "the target has other files: $(ls -A "$tmp/target")"
    echo "    host: the volume is not mounted, the target has a guard without space"
}

begin "${node_commands[@]}"
say "starting crust_ops, containerd and a driver, with its pool in \$tmp ($tmp)"
# For ctr, and for programs that containerd starts.
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
say "creating a volume, staging it, and publishing it with defer_fs_ops: the host does not mount it"
mode=(--fs xfs --access-mode single-node-single-writer)
show volume create "$volume" --size 320Mi "${mode[@]}"
show volume stage "$volume" --staging "$tmp/staging" "${mode[@]}"
show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" --defer-fs-ops "${mode[@]}"
shell jq . "$tmp"/crust/*/mountInfo.json
check_host
say "the volume condition reports that no runtime has mounted the volume"
show volume stats "$volume" --path "$tmp/target"
say "starting a container with containerd and csi-loopback-runc, which calls runc"
run_container writer 'echo "written in the container" >/data/file; sleep 1000'
await "the file" in_container cat /data/file
shell in_container df -h /data
check_host
say "getting statistics and growing the volume while the container runs"
show volume stats "$volume" --path "$tmp/target"
show volume expand "$volume" --size 512Mi --path "$tmp/target"
shell in_container df -h /data
check_host
say "csi-loopback-runc rejects a container of another pod"
rejected "another pod" run_container intruder 'sleep 1000'
say "removing the container; the host can now mount the volume, which has the data"
before_clean_up
show volume unpublish "$volume" --target "$tmp/target"
[[ ! -e $tmp/target && -z $(ls -A "$tmp/crust") ]] || die "files of the publication remain"
mkdir check
mount -o ro "$(loops_of "$tmp" | awk '/vol-demo-/ { print $1 }')" check
shell cat check/file
umount check
remove_volume
