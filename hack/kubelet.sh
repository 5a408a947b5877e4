#!/usr/bin/env bash
# hack/kubelet.sh DIR: runs a node for the cluster of hack/cluster.sh in DIR: a released kubelet
# with containerd and runc, so that pods run. The node's name is "node". Without a scheduler, pods
# need spec.nodeName; without a network plugin, hostNetwork. The only image is
# localhost/busybox:node, with imagePullPolicy Never.
#
# CSI_LOOPBACK_BINARY, the path of csi-loopback, adds a second runtime to containerd, the
# RuntimeClass handler csi-loopback: this binary under the name csi-loopback-runc, which calls runc.
#
# Runs until SIGTERM or SIGINT, or until its parent ends, and then stops everything that it started.
# It creates DIR/node with
#   ready       created when the node accepts pods; use nothing before
#   port        of kubelet on 127.0.0.1, for clients with DIR/kubeconfig: it runs commands in containers
#   pid         of the first process in the namespaces, to enter them
#   crust/      files that crust_ops and csi-loopback-runc share
#   kubelet/    kubelet's --root-dir, a separate mount: pods/, plugins_registry/, …
#   stop        created by a test: kubelet is killed and does not run while the file exists; pods continue to run
#   *.log       of kubelet and containerd
#
# All processes run in their own PID and mount namespaces and end with them. Mounts of drivers on
# the host below DIR/node/kubelet propagate into the mount namespace. In the namespaces, copies hide
# what kubelet would change on the machine: kernel settings, /var/lib/kubelet, /var/log, /run. The
# network of the machine is not changed.
#
# Exits with 77 if the machine does not meet the requirements; the last line of stderr gives the
# reason.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/oci.sh
source "$(dirname "$0")/oci.sh"
# shellcheck source=hack/parts.sh
source "$(dirname "$0")/parts.sh"
# shellcheck source=hack/kubernetes.sh
source "$(dirname "$0")/kubernetes.sh"

image=localhost/busybox:node

inside=
[[ ${1:-} != --inside ]] || { inside=1 && shift; }
(($# == 1)) || die "usage: hack/kubelet.sh DIR"
umask 077
cluster=$(realpath "$1")
dir=$cluster/node pki=$cluster/pki
((${#cluster} <= 65)) || die "$cluster: path too long; the path of a unix socket has at most 107 bytes"

kubectl() { "$cluster/tools/kubectl" --kubeconfig "$cluster/kubeconfig" --cache-dir "$cluster/cache" "$@"; }

# --- Inside the namespaces ------------------------------------------------------------------------

isolate_machine() {
    hide_machine "$dir"
    # Kubelet creates /var/lib/kubelet even with another --root-dir.
    mkdir /run/lib /run/lib/upper /run/lib/work
    mount -t overlay -o lowerdir=/var/lib,upperdir=/run/lib/upper,workdir=/run/lib/work overlay /var/lib
}

# runtimes_config: prints containerd's configuration of the second runtime, if there is one.
runtimes_config() {
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
  # Root in a container may lack the capability to lower it.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    # Plain directories work on every filesystem.
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$dir/cni"
    conf_dir = "$dir/cni"
$(runtimes_config)
END
    # containerd passes its environment on to shims and runtimes.
    CSI_LOOPBACK_RUNC_CONFIG=$dir/oci-runtime.yaml start containerd containerd --config "$dir/containerd.toml"
    await containerd ctr --address "$dir/containerd.sock" version
}

# import_image: builds and imports an image with busybox, whose default command is sleep.
import_image() {
    local work=$dir/image
    mkdir -p "$work"/root/{bin,tmp,proc,sys,dev}
    chmod -R go+rX "$work/root"
    chmod 1777 "$work/root/tmp"
    install -m 755 "$(command -v busybox)" "$work/root/bin/busybox"
    busybox --list | grep -vx busybox | xargs -I{} ln -sf busybox "$work/root/bin/{}"
    oci_layer "$work/root" "$work/layer"
    oci_image "$dir/image.tar" "$image" '{"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "2147483647"]}' "$work/layer"
    ctr --address "$dir/containerd.sock" --namespace k8s.io images import --snapshotter native "$dir/image.tar" \
        >"$dir/image.log" 2>&1 || give_up image "could not be imported"
    rm -r "$work" "$dir"/image.{tar,digest}
}

configure_kubelet() { # configure_kubelet PORT
    kubelet_configuration >"$dir/kubelet.yaml"
    cat >>"$dir/kubelet.yaml" <<END
address: 127.0.0.1
port: $1
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: $pki/ca.crt}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://$dir/containerd.sock
podLogsDir: $dir/logs
# How often kubelet gets volume statistics.
volumeStatsAggPeriod: 1s
END
}

start_kubelet() {
    start kubelet "$cluster/tools/kubelet" --config="$dir/kubelet.yaml" --kubeconfig="$cluster/kubeconfig" \
        --root-dir="$dir/kubelet" --cert-dir="$dir" --hostname-override=node --v=3 \
        --vmodule=volume_stat_calculator=4 # logs why a volume has no statistics
}

node_is_ready() {
    kubectl --request-timeout=5s --server="https://127.0.0.1:$(<"$dir/port")" get --raw /healthz &&
        kubectl --request-timeout=5s get node node
}

run_inside() {
    local name
    trap 'exit 0' INT TERM HUP
    isolate_machine
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
            kill -0 "${pid_of[$name]}" 2>/dev/null || give_up "$name" "ended unexpectedly"
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

# kill_namespaces: kills all processes in the namespaces, and waits for their end.
kill_namespaces() {
    local first
    # The kernel kills the other processes with the first one, before unshare gets its exit status.
    first=$(first_child "$pid")
    [[ -z $first ]] || kill -KILL "$first" 2>/dev/null
    [[ -n $first ]] || kill -KILL "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
}

cleanup() { # cleanup STATUS: stops everything that was started, removes mounts and cgroups, and exits with STATUS
    # A second interrupt must not stop the cleanup.
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    rm -f "$dir/ready"
    [[ -z $pid ]] || kill_namespaces
    local at
    # Also the mounts of drivers: without kubelet, no client calls them to unmount.
    while read -r at; do
        umount "$at" 2>/dev/null || umount --lazy "$at"
    done < <(mounts_below "$dir")
    find /sys/fs/cgroup -depth -type d -path "*/$cgroup*" -exec rmdir {} \; 2>/dev/null
    # Filesystems of containers. The logs stay.
    rm -rf --one-file-system "$dir/containerd"
    exit "$1"
}

run_outside() {
    is_root || cannot_run "needs root, for containers"
    [[ $cluster != /run/* && $cluster != /var/l* ]] || die "$cluster: hidden on the node; use a directory outside of /run, /var/lib and /var/log"
    [[ -e $cluster/ready ]] || die "$cluster: no cluster is ready; run hack/cluster.sh $cluster first"
    [[ -x $cluster/tools/kubelet ]] || cannot_run "the Kubernetes tools have no kubelet"
    install_missing "${node_commands[@]}" jq openssl setpriv setsid unshare >&2 || exit 77
    ! ldd "$(command -v busybox)" >/dev/null 2>&1 || cannot_run "busybox is not statically linked; install busybox-static"
    mkdir "$dir" "$dir/kubelet" || die "$dir: already has a node; start a new cluster"
    trap 'cleanup $?' EXIT
    trap 'cleanup 0' INT TERM HUP
    # Mounts of drivers must propagate into the namespace.
    mount --bind "$dir/kubelet" "$dir/kubelet"
    mount --make-private "$dir/kubelet"
    mount --make-shared "$dir/kubelet"
    make_certificate kubelet ca /CN=kubelet serverAuth IP:127.0.0.1 >"$dir/certificate.log" 2>&1 || give_up certificate "could not be created"
    free_port >"$dir/port"
    make_cgroups "$cgroup"
    setpriv --pdeathsig KILL unshare --pid --mount --propagation slave --mount-proc --kill-child \
        bash "${BASH_SOURCE[0]}" --inside "$cluster" &
    pid=$!
    until [[ -s $dir/pid ]] || ! kill -0 "$pid" 2>/dev/null; do
        first_child "$pid" >"$dir/pid"
    done
    until orphaned || ! kill -0 "$pid" 2>/dev/null; do
        sleep 0.5 &
        wait -n "$pid" $! || true
    done
    orphaned || die "the node ended unexpectedly"
}

cannot_run() { # cannot_run REASON
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
