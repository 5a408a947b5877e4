#!/usr/bin/env bash
# hack/kubelet.sh DIR: a node for the cluster that hack/cluster.sh runs in DIR: a released kubelet with containerd
# and runc, so that pods run. Its name is "node"; a pod gets there by spec.nodeName, for there is no scheduler. Pods
# need hostNetwork (there is no network plugin) and the image localhost/busybox:node, with imagePullPolicy Never.
#
# With CSI_LOOPBACK_BINARY, the path of csi-loopback, containerd has a second runtime for a RuntimeClass to name: the handler
# csi-loopback, which is that program by the name csi-loopback-runc, in front of runc.
#
# Runs until SIGTERM or SIGINT, or until its parent has gone, and then ends all that it has started. DIR/node
# is made, and holds
#   ready       when the node can take pods; until then nothing is to be used
#   port        where kubelet serves 127.0.0.1, for who has DIR/kubeconfig: it runs commands in containers
#   pid         of the first process in the namespaces, for who has to enter them
#   crust/      what crust_ops and csi-loopback-runc hand each other over
#   kubelet/    its directory (--root-dir), a mount of its own: pods/, plugins_registry/, …
#   stop        while somebody has put it there, kubelet does not run; it is killed for it, pods go on
#   *.log       kubelet's and containerd's
#
# All of it lives in a PID and a mount namespace of its own, which end with whatever is in them, and into
# which the host's mounts below DIR/node/kubelet come, as drivers make them. In it, what kubelet would change of the machine
# is covered: its kernel settings, /var/lib/kubelet, /var/log, /run. It leaves the machine's network alone.
#
# Exits with 77 when the machine lacks what it needs; the last line of stderr says why.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/parts.sh
source "$(dirname "$0")/parts.sh"

image=localhost/busybox:node

inside=
[[ ${1:-} != --inside ]] || { inside=1 && shift; }
(($# == 1)) || die "usage: hack/kubelet.sh DIR"
umask 077
cluster=$(realpath "$1")
dir=$cluster/node
((${#cluster} <= 65)) || die "$cluster: too long, a socket's path has room for 107 bytes"

kubectl() { "$cluster/tools/kubectl" --kubeconfig "$cluster/kubeconfig" --cache-dir "$cluster/cache" "$@"; }

# --- Inside the namespaces ------------------------------------------------------------------------

# cover: puts something of the node's own over what belongs to the machine.
cover() {
    local setting at
    # Others' filesystems have been copied into this namespace: nobody could take their devices away.
    while read -r at; do
        umount --lazy "$at" 2>/dev/null || true
    done < <(list_mounts | awk -v dir="$dir/" '$2 ~ "^/dev/loop" && index($1, dir) != 1 { print $1 }')
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=755 tmpfs /var/log
    # Kubelet makes /var/lib/kubelet, whatever its directory.
    mkdir /run/lib /run/lib/upper /run/lib/work
    mount -t overlay -o lowerdir=/var/lib,upperdir=/run/lib/upper,workdir=/run/lib/work overlay /var/lib
    # What kubelet would write there if it were not there yet.
    for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
        at=${setting%=*}
        printf '%s\n' "${setting#*=}" >"/run/${at//\//.}"
        mount --bind "/run/${at//\//.}" "/proc/sys/$at"
    done
}

# with_runtimes: the rest of containerd's configuration, where there is a second runtime.
with_runtimes() {
    [[ -n ${CSI_LOOPBACK_BINARY:-} ]] || return 0
    # The name selects the mode.
    ln -s "$CSI_LOOPBACK_BINARY" "$dir/csi-loopback-runc"
    mkdir -m 700 "$dir/crust" "$dir/oci-runtime"
    cat >"$dir/oci-runtime.yaml" <<END
runtime: runc
crustDir: $dir/crust
workDir: $dir/oci-runtime
kubeletDir: $dir/kubelet
END
    cat <<END
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.csi-loopback]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.csi-loopback.options]
      BinaryName = "$dir/csi-loopback-runc"
END
}

start_containerd() {
    cat >"$dir/containerd.toml" <<END
version = 2
root = "$dir/containerd/root"
state = "$dir/containerd/state"
[grpc]
  address = "$dir/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$image"
  # Not everybody who is root may do so.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    # Plain directories: works on any filesystem.
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$dir/cni"
    conf_dir = "$dir/cni"
$(with_runtimes)
END
    # What it starts has the rest of its environment, and so does what these start.
    CSI_LOOPBACK_RUNC_CONFIG=$dir/oci-runtime.yaml start containerd containerd --config "$dir/containerd.toml"
    await containerd ctr --address "$dir/containerd.sock" version
}

# import_image: an image with busybox in it, which sleeps when it is told nothing else.
import_image() {
    local files=$dir/image layer
    mkdir -p "$files/root/bin" "$files/root/tmp" "$files/root/proc" "$files/root/sys" "$files/root/dev"
    chmod -R go+rX "$files/root"
    chmod 1777 "$files/root/tmp"
    install -m 755 "$(command -v busybox)" "$files/root/bin/busybox"
    busybox --list | grep -vx busybox | xargs -I{} ln -sf busybox "$files/root/bin/{}"
    tar --create --numeric-owner --owner=0 --group=0 --directory="$files/root" --file="$files/layer.tar" .
    layer=$(sha256sum "$files/layer.tar" | cut -d ' ' -f 1)
    cat >"$files/config.json" <<END
{"architecture": "$(go_architecture)", "os": "linux",
 "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "2147483647"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
    printf '[{"Config": "config.json", "RepoTags": ["%s"], "Layers": ["layer.tar"]}]\n' "$image" \
        >"$files/manifest.json"
    tar --create --directory="$files" --file="$dir/image.tar" manifest.json config.json layer.tar
    ctr --address "$dir/containerd.sock" --namespace k8s.io images import --snapshotter native "$dir/image.tar" \
        >"$dir/image.log" 2>&1 || give_up image "cannot be imported"
    rm -r "$files" "$dir/image.tar"
}

go_architecture() {
    case $(uname -m) in
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    *) uname -m ;;
    esac
}

configure_kubelet() { # configure_kubelet PORT
    cat >"$dir/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
port: $1
healthzPort: 0
tlsCertFile: $cluster/pki/kubelet.crt
tlsPrivateKeyFile: $cluster/pki/kubelet.key
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: $cluster/pki/ca.crt}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://$dir/containerd.sock
podLogsDir: $dir/logs
# Cgroups, of whatever version, below one of the node's own.
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
resolvConf: ""
oomScoreAdj: 0
makeIPTablesUtilChains: false
# The machine's disk may be as full as it likes, and the one image cannot be had again.
evictionHard: {memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}
imageGCHighThresholdPercent: 100
# How often a pod's volumes are looked at, and so how soon a driver is asked to publish again (requiresRepublish).
syncFrequency: 1s
# How often it is asked how full they are.
volumeStatsAggPeriod: 1s
END
}

start_kubelet() {
    start kubelet "$cluster/tools/kubelet" --config="$dir/kubelet.yaml" --kubeconfig="$cluster/kubeconfig" \
        --root-dir="$dir/kubelet" --cert-dir="$dir" --hostname-override=node --v=3 \
        --vmodule=volume_stat_calculator=4 # that says why a volume has no figures
}

node_is_ready() {
    kubectl --request-timeout=5s --server="https://127.0.0.1:$(<"$dir/port")" get --raw /healthz &&
        kubectl --request-timeout=5s get node node
}

run_inside() {
    local name
    trap 'exit 0' INT TERM HUP
    cover
    configure_kubelet "$(<"$dir/port")"
    start_containerd
    import_image
    start_kubelet
    await kubelet node_is_ready
    : >"$dir/ready"
    printf 'ready after %d s\n' "$SECONDS"
    while true; do
        sleep 0.1 &
        wait $! || true
        [[ ! -e $dir/stop ]] || pause_kubelet
        for name in "${!pid_of[@]}"; do
            kill -0 "${pid_of[$name]}" 2>/dev/null || give_up "$name" "has ended"
        done
    done
}

pause_kubelet() {
    kill -KILL "${pid_of[kubelet]}" 2>/dev/null || true
    wait "${pid_of[kubelet]}" 2>/dev/null || true
    rm -f "$dir/ready"
    while [[ -e $dir/stop ]]; do sleep 0.1; done
    start_kubelet
    await kubelet node_is_ready
    : >"$dir/ready"
}

# --- Outside --------------------------------------------------------------------------------------

# first_inside: the first process in the namespaces.
first_inside() {
    awk -v parent="$pid" '/^PPid:/ && $2 == parent { split(FILENAME, at, "/"); print at[3] }' \
        /proc/[0-9]*/status 2>/dev/null || true
}

# end_inside: ends what runs in the namespaces, and returns when nothing of it is left.
end_inside() {
    local first
    # With the first process all the others go, and only then unshare hears of its end.
    first=$(first_inside)
    [[ -z $first ]] || kill -KILL "$first" 2>/dev/null
    [[ -n $first ]] || kill -KILL "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
}

cleanup() { # cleanup STATUS: ends what was started, undoes what was made, and exits with that
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    rm -f "$dir/ready"
    [[ -z $pid ]] || end_inside
    local at
    # What drivers have left there, too: nobody else would ask them to take it away.
    while read -r at; do
        umount "$at" 2>/dev/null || umount --lazy "$at"
    done < <(mounts_below "$dir")
    find /sys/fs/cgroup -depth -type d -path "*/$cgroup*" -exec rmdir {} \; 2>/dev/null
    # The sandboxes' filesystems: of no interest to anybody, unlike the logs.
    rm -rf --one-file-system "$dir/containerd"
    exit "$1"
}

free_port() {
    local port
    # Below those that the kernel gives away by itself.
    until port=$((20000 + SRANDOM % 12000)) && ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
    printf '%s\n' "$port"
}

make_certificate() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -CA "$cluster/pki/ca.crt" -CAkey "$cluster/pki/ca.key" -keyout "$cluster/pki/kubelet.key" \
        -out "$cluster/pki/kubelet.crt" -subj /CN=kubelet -addext "basicConstraints=critical,CA:FALSE" \
        -addext "extendedKeyUsage=serverAuth" -addext "subjectAltName=IP:127.0.0.1"
}

# make_cgroups: the one that kubelet wants to find, in each hierarchy.
make_cgroups() {
    local at
    while read -r at; do
        mkdir -p "$at/$cgroup" 2>/dev/null || true
    done < <(awk '/ - cgroup2? / && $5 ~ "^/sys/fs/cgroup" { print $5 }' /proc/self/mountinfo)
    # Without them a new cpuset takes no process.
    at=/sys/fs/cgroup/cpuset
    if [[ -d $at/$cgroup ]]; then
        cat "$at/cpuset.cpus" >"$at/$cgroup/cpuset.cpus"
        cat "$at/cpuset.mems" >"$at/$cgroup/cpuset.mems"
    fi
}

run_outside() {
    is_root || lacking "needs root, for containers"
    [[ $cluster != /run/* && $cluster != /var/l* ]] || die "$cluster: is covered on the node; elsewhere than in /run, /var/lib and /var/log"
    [[ -e $cluster/ready ]] || die "$cluster: there is no cluster that is ready"
    [[ -x $cluster/tools/kubelet ]] || lacking "there is no kubelet among the Kubernetes tools"
    install_missing "${node_commands[@]}" openssl setpriv setsid unshare >&2 || exit 77
    ! ldd "$(command -v busybox)" >/dev/null 2>&1 || lacking "busybox is not statically linked; Debian's busybox-static is"
    mkdir "$dir" "$dir/kubelet" || die "$dir: there is or was a node already"
    trap 'cleanup $?' EXIT
    trap 'cleanup 0' INT TERM HUP
    # What a driver mounts here is to be seen inside.
    mount --bind "$dir/kubelet" "$dir/kubelet"
    mount --make-private "$dir/kubelet"
    mount --make-shared "$dir/kubelet"
    make_certificate >"$dir/certificate.log" 2>&1 || give_up certificate "cannot be made"
    free_port >"$dir/port"
    make_cgroups
    setpriv --pdeathsig KILL unshare --pid --mount --propagation slave --mount-proc --kill-child \
        bash "${BASH_SOURCE[0]}" --inside "$cluster" &
    pid=$!
    until [[ -s $dir/pid ]] || ! kill -0 "$pid" 2>/dev/null; do
        first_inside >"$dir/pid"
    done
    until orphaned || ! kill -0 "$pid" 2>/dev/null; do
        sleep 0.5 &
        wait -n "$pid" $! || true
    done
    orphaned || die "the node has ended"
}

lacking() {
    echo "$*" >&2
    exit 77
}

cgroup=csi-loopback-${dir//[^A-Za-z0-9]/-}
pid=
if [[ -n $inside ]]; then
    run_inside
else
    run_outside
fi
