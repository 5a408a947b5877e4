#!/usr/bin/env bash
# hack/e2e/node.sh DIR: the machine of the cluster of hack/e2e.sh, control plane and node in one. hack/e2e.sh starts it as the
# first process of new PID, mount and network namespaces, which end with it and with which all that runs in them ends.
#
# The namespaces have a /var/lib, /etc and /usr/local that are kept in DIR, and a /run and /var/log in memory. The network has
# no way out. Started again on the same DIR this is a node that rebooted.
#
# DIR holds
#   ready       while the API server and the node answer
#   kubeconfig  the administrator's, for use in the network namespace
#   tools/      Kubernetes, etcd, CNI plugins, … (hack/lib.sh, kubernetes_tools and e2e_tools)
#   images/     archives, which containerd imports at the start
#   restart/    a file with the name of a part kills this part, which is then started again; the file goes with that
#   log/        a log for each part
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/../lib.sh"
# shellcheck source=hack/parts.sh
source "$repo/hack/parts.sh"
# shellcheck source=hack/pki.sh
source "$repo/hack/pki.sh"

umask 022
base=$1
dir=$base/log # where start and await write
pki=$base/pki
tools=$base/tools
node_address=192.0.2.1
cgroup=csi-loopback-e2e-$(cut -c1-8 <<<"$(sha256sum <<<"$base")")
socket=unix:///run/containerd/containerd.sock

kubectl() { "$tools/kubectl" --kubeconfig "$base/kubeconfig" --cache-dir "$base/cache" "$@"; }

# --- The machine ----------------------------------------------------------------------------------

cover() {
    local at setting
    # Other mounts of loop devices were copied into this namespace, where they keep their devices in use.
    while read -r at; do
        umount --lazy "$at" 2>/dev/null || true
    done < <(list_mounts | awk '$2 ~ "^/dev/loop" { print $1 }')
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=755 tmpfs /var/log
    for at in etc usr/local; do
        mkdir -p "$base/machine/$at/upper" "$base/machine/$at/work"
        mount -t overlay -o "lowerdir=/$at,upperdir=$base/machine/$at/upper,workdir=$base/machine/$at/work" overlay "/$at"
    done
    mkdir -p "$base/machine/var/lib"
    mount --bind "$base/machine/var/lib" /var/lib
    mkdir -p /var/lib/kubelet
    # Mounts of drivers in their containers must propagate to kubelet and the containers of pods.
    mount --bind /var/lib/kubelet /var/lib/kubelet
    mount --make-shared /var/lib/kubelet
    # Kubelet sets these of the machine.
    for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
        at=${setting%=*}
        printf '%s\n' "${setting#*=}" >"/run/${at//\//.}"
        mount --bind "/run/${at//\//.}" "/proc/sys/$at"
    done
}

# The default route leads to the other end of a pair, which discards everything: addresses of Services need a route before
# they are translated.
make_network() {
    ip link set lo up
    ip link add node0 type veth peer name node1
    ip link set node0 up && ip link set node1 up
    ip address add "$node_address/24" dev node0
    ip route add default dev node0 src "$node_address"
    echo 1 >/proc/sys/net/ipv4/ip_forward
}

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

# --- The control plane ----------------------------------------------------------------------------

make_pki() {
    # The aggregation layer has a separate authority: a holder of one of its certificates can act as any user.
    make_ca ca && make_ca front-proxy-ca &&
        make_certificate apiserver ca /CN=kube-apiserver serverAuth \
            "DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:$node_address,IP:10.96.0.1" &&
        make_certificate admin ca /O=system:masters/CN=admin clientAuth &&
        make_certificate kubelet-client ca /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth &&
        make_certificate front-proxy front-proxy-ca /CN=front-proxy clientAuth &&
        make_certificate controller-manager ca /CN=system:kube-controller-manager clientAuth &&
        make_certificate scheduler ca /CN=system:kube-scheduler clientAuth &&
        make_certificate proxy ca /CN=system:kube-proxy clientAuth &&
        make_certificate node ca /O=system:nodes/CN=system:node:node clientAuth &&
        make_certificate kubelet ca /CN=kubelet serverAuth "IP:$node_address" &&
        openssl genrsa -out "$pki/sa.key" 2048 &&
        openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub"
}

start_etcd() {
    # On sockets, whose names must contain a port.
    start etcd env --chdir=/run "$tools/etcd" --name=local --data-dir=/var/lib/etcd --log-level=warn --unsafe-no-fsync \
        --listen-client-urls=unix://client:0 --advertise-client-urls=unix://client:0 \
        --listen-peer-urls=unix://peer:0 --initial-advertise-peer-urls=unix://peer:0 \
        --initial-cluster=local=unix://peer:0
}

start_kube-apiserver() {
    start kube-apiserver "$tools/kube-apiserver" \
        --advertise-address="$node_address" --secure-port=6443 \
        --cert-dir=/run --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
        --etcd-servers=unix:///run/client:0 --service-cluster-ip-range=10.96.0.0/16 \
        --client-ca-file="$pki/ca.crt" --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
        --service-account-issuer=https://kubernetes.default.svc.cluster.local \
        --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
        --allow-privileged=true \
        --kubelet-client-certificate="$pki/kubelet-client.crt" --kubelet-client-key="$pki/kubelet-client.key" \
        --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
        --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy \
        --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group \
        --requestheader-username-headers=X-Remote-User \
        --proxy-client-cert-file="$pki/front-proxy.crt" --proxy-client-key-file="$pki/front-proxy.key" \
        --profiling=false
}

start_kube-controller-manager() {
    start kube-controller-manager "$tools/kube-controller-manager" --kubeconfig="$base/controller-manager.conf" \
        --bind-address=127.0.0.1 --cert-dir=/run --leader-elect=false --use-service-account-credentials \
        --root-ca-file="$pki/ca.crt" --service-account-private-key-file="$pki/sa.key" --profiling=false
}

start_kube-scheduler() {
    start kube-scheduler "$tools/kube-scheduler" --kubeconfig="$base/scheduler.conf" \
        --bind-address=127.0.0.1 --cert-dir=/run --leader-elect=false --profiling=false
}

start_kube-proxy() {
    cat >/run/kube-proxy.yaml <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: $base/proxy.conf}
clusterCIDR: 10.244.0.0/24
hostnameOverride: node
bindAddress: $node_address
metricsBindAddress: 127.0.0.1
# These belong to the machine, not to the network namespace.
conntrack: {maxPerCore: 0}
oomScoreAdj: 0
END
    start kube-proxy "$tools/kube-proxy" --config=/run/kube-proxy.yaml
}

# --- The node -------------------------------------------------------------------------------------

start_containerd() {
    mkdir -p /run/cni
    # A separate link between the node and each pod, so that all traffic is routed and translated.
    cat >/run/cni/e2e.conflist <<'END'
{"cniVersion": "1.0.0", "name": "e2e", "plugins": [{"type": "ptp", "ipam": {"type": "host-local",
 "dataDir": "/run/cni/addresses", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    cat >/run/containerd.toml <<END
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:e2e"
  # Lowering it needs CAP_SYS_RESOURCE, which root may lack.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$tools"
    conf_dir = "/run/cni"
END
    # A further handler, such as that of deploy/runtime.
    [[ ! -e /etc/containerd/handler.toml ]] || grep -v '^version' /etc/containerd/handler.toml >>/run/containerd.toml
    start containerd env TMPDIR=/run containerd --config /run/containerd.toml
    await containerd ctr version
}

import_images() {
    local archive
    for archive in "$base"/images/*.tar; do
        [[ -e $archive ]] || continue
        ctr --namespace k8s.io images import "$archive" && rm "$archive" || return 1
    done
}

start_kubelet() {
    cat >/run/kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $node_address
healthzPort: 0
tlsCertFile: $pki/kubelet.crt
tlsPrivateKeyFile: $pki/kubelet.key
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: $pki/ca.crt}
authorization: {mode: Webhook}
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: ""
containerRuntimeEndpoint: $socket
# Cgroups of any version, below one of the node's own.
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
makeIPTablesUtilChains: false
# The images cannot be pulled again.
evictionHard: {memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}
imageGCHighThresholdPercent: 100
# Short, so that tests wait less: how often a pod's volumes are checked, and the sizes of volumes are read.
syncFrequency: 1s
volumeStatsAggPeriod: 5s
END
    start kubelet env TMPDIR=/run "$tools/kubelet" --config=/run/kubelet.yaml --kubeconfig="$base/node.conf" \
        --cert-dir=/run --hostname-override=node --node-ip="$node_address" --v=2
}

node_is_ready() {
    kubectl --request-timeout=5s wait --for=condition=Ready --timeout=1s node/node
}

# --------------------------------------------------------------------------------------------------

parts=(etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy containerd kubelet)

# restart PART: kills a part and starts it again; its containers run on.
restart() {
    kill -KILL "${pid_of[$1]}" 2>/dev/null || true
    wait "${pid_of[$1]}" 2>/dev/null || true
    "start_$1"
    rm -f "$base/restart/$1"
}

trap 'exit 0' INT TERM HUP
mkdir -p "$dir" "$base/restart" "$base/images"
rm -f "$base/ready"
cover
make_network
make_cgroups
if [[ ! -d $pki ]]; then
    mkdir -m 700 "$pki"
    make_pki >"$dir/pki.log" 2>&1 || give_up pki "cannot be made"
    for user in controller-manager scheduler proxy node admin; do
        write_kubeconfig "$base/$user.conf" https://127.0.0.1:6443 "$user"
    done
    mv "$base/admin.conf" "$base/kubeconfig"
fi
start_etcd
await etcd test -S /run/client:0
start_kube-apiserver
start_containerd
import_images >"$dir/images.log" 2>&1 || give_up images "cannot be imported"
await kube-apiserver kubectl --request-timeout=5s get --raw /readyz
start_kube-controller-manager
start_kube-scheduler
start_kubelet
start_kube-proxy
await kubelet node_is_ready
: >"$base/ready"
while true; do
    sleep 0.2 &
    wait $! || true
    for part in "${parts[@]}"; do
        [[ ! -e $base/restart/$part ]] || restart "$part"
        kill -0 "${pid_of[$part]}" 2>/dev/null || give_up "$part" "has ended"
    done
done
