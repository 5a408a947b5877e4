#!/usr/bin/env bash
# hack/e2e/node.sh DIR [NUMBER]: a machine of the cluster of hack/e2e.sh: the first one is control plane and node in one, "node";
# with NUMBER, from 2, it is another node, "node-NUMBER". hack/e2e.sh starts it as the first process of new PID, mount and network
# namespaces, which end with it and with which all that runs in them ends.
#
# The namespaces have a /var/lib, /etc and /usr/local that are kept in DIR, and a /run and /var/log in memory. The network has
# no way out but to the other machines. Started again on the same DIR this is a node that rebooted.
#
# DIR holds
#   kubeconfig  the administrator's, for use in the network namespace
#   tools/      Kubernetes, etcd, CNI plugins, … (hack/lib.sh, kubernetes_tools and e2e_tools)
# and, of another node in DIR/nodes/NUMBER,
#   ready       while the API server and the node answer
#   images/     archives, which containerd imports at the start
#   restart/    a file with the name of a part kills this part, which is then started again; the file goes with that
#   log/        a log for each part
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/../lib.sh"
# shellcheck source=hack/parts.sh
source "$repo/hack/parts.sh"
# shellcheck source=hack/kubernetes.sh
source "$repo/hack/kubernetes.sh"

umask 022
base=$1
number=${2:-1}
((number == 1)) && node_name=node home=$base || node_name=node-$number home=$base/nodes/$number
dir=$home/log # where start and await write
pki=$base/pki
tools=$base/tools
node_address=192.0.2.$number
pod_addresses=10.244.$((number - 1)).0/24
cgroup=csi-loopback-e2e-$(cut -c1-8 <<<"$(sha256sum <<<"$base")")-$number
socket=unix:///run/containerd/containerd.sock

kubectl() { "$tools/kubectl" --kubeconfig "$home/kubeconfig" --cache-dir "$base/cache" "$@"; }

# --- The machine ----------------------------------------------------------------------------------

cover() {
    local at
    hide_machine ""
    for at in etc usr/local; do
        mkdir -p "$home/machine/$at/upper" "$home/machine/$at/work"
        mount -t overlay -o "lowerdir=/$at,upperdir=$home/machine/$at/upper,workdir=$home/machine/$at/work" overlay "/$at"
    done
    mkdir -p "$home/machine/var/lib"
    mount --bind "$home/machine/var/lib" /var/lib
    mkdir -p /var/lib/kubelet
    # Mounts of drivers in their containers must propagate to kubelet and the containers of pods.
    mount --bind /var/lib/kubelet /var/lib/kubelet
    mount --make-shared /var/lib/kubelet
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

# join_network: waits for the link to the first machine (hack/e2e/cluster.sh, link_node), which routes to all others.
join_network() {
    ip link set lo up
    await network ip link show node0
    ip link set node0 up
    ip address add "$node_address/32" dev node0
    ip route add 192.0.2.1 dev node0 src "$node_address"
    ip route add default via 192.0.2.1 src "$node_address"
    echo 1 >/proc/sys/net/ipv4/ip_forward
}

# --- The control plane ----------------------------------------------------------------------------

make_pki() {
    make_cluster_pki ",IP:$node_address,IP:10.96.0.1" &&
        make_certificate kubelet-client ca /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth &&
        make_certificate controller-manager ca /CN=system:kube-controller-manager clientAuth &&
        make_certificate scheduler ca /CN=system:kube-scheduler clientAuth &&
        make_certificate proxy ca /CN=system:kube-proxy clientAuth &&
        make_certificate node ca /O=system:nodes/CN=system:node:node clientAuth &&
        make_certificate kubelet ca /CN=kubelet serverAuth "IP:192.0.2.1,IP:192.0.2.2,IP:192.0.2.3"
}

# make_worker_pki: the identity of another node, with the API server's address of the first.
make_worker_pki() {
    make_certificate "$node_name" ca "/O=system:nodes/CN=system:node:$node_name" clientAuth
    write_kubeconfig "$base/$node_name.conf" https://192.0.2.1:6443 "$node_name"
    write_kubeconfig "$home/proxy.conf" https://192.0.2.1:6443 proxy
    write_kubeconfig "$home/kubeconfig" https://192.0.2.1:6443 admin
}

start_part_etcd() { start_etcd /run /var/lib/etcd; }

start_part_kube-apiserver() {
    start_kube_apiserver /run --advertise-address="$node_address" --secure-port=6443 --cert-dir=/run \
        --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
        --service-account-issuer=https://kubernetes.default.svc.cluster.local \
        --kubelet-client-certificate="$pki/kubelet-client.crt" --kubelet-client-key="$pki/kubelet-client.key" \
        --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP
}

start_part_kube-controller-manager() {
    start kube-controller-manager "$tools/kube-controller-manager" --kubeconfig="$base/controller-manager.conf" \
        --bind-address=127.0.0.1 --cert-dir=/run --leader-elect=false --use-service-account-credentials \
        --root-ca-file="$pki/ca.crt" --service-account-private-key-file="$pki/sa.key" --profiling=false
}

start_part_kube-scheduler() {
    start kube-scheduler "$tools/kube-scheduler" --kubeconfig="$base/scheduler.conf" \
        --bind-address=127.0.0.1 --cert-dir=/run --leader-elect=false --profiling=false
}

start_part_kube-proxy() {
    cat >/run/kube-proxy.yaml <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: $home/proxy.conf}
clusterCIDR: 10.244.0.0/16
hostnameOverride: $node_name
bindAddress: $node_address
metricsBindAddress: 127.0.0.1
# These belong to the machine, not to the network namespace.
conntrack: {maxPerCore: 0}
oomScoreAdj: 0
END
    start kube-proxy "$tools/kube-proxy" --config=/run/kube-proxy.yaml
}

# --- The node -------------------------------------------------------------------------------------

start_part_containerd() {
    mkdir -p /run/cni
    # A separate link between the node and each pod, so that all traffic is routed and translated.
    cat >/run/cni/e2e.conflist <<END
{"cniVersion": "1.0.0", "name": "e2e", "plugins": [{"type": "ptp", "ipam": {"type": "host-local",
 "dataDir": "/run/cni/addresses", "ranges": [[{"subnet": "$pod_addresses"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
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
    for archive in "$home"/images/*.tar; do
        [[ -e $archive ]] || continue
        ctr --namespace k8s.io images import "$archive" && rm "$archive" || return 1
    done
}

start_part_kubelet() {
    kubelet_configuration >/run/kubelet.yaml
    cat >>/run/kubelet.yaml <<END
address: $node_address
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: $pki/ca.crt}
authorization: {mode: Webhook}
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
containerRuntimeEndpoint: $socket
# How often the sizes of volumes are read.
volumeStatsAggPeriod: 5s
END
    start kubelet env TMPDIR=/run "$tools/kubelet" --config=/run/kubelet.yaml --kubeconfig="$base/$node_name.conf" \
        --cert-dir=/run --hostname-override="$node_name" --node-ip="$node_address" --v=2
}

node_is_ready() {
    kubectl --request-timeout=5s wait --for=condition=Ready --timeout=1s "node/$node_name"
}

# --------------------------------------------------------------------------------------------------

parts=(kube-proxy containerd kubelet)
((number > 1)) || parts+=(etcd kube-apiserver kube-controller-manager kube-scheduler)

# restart PART: kills a part and starts it again; its containers run on.
restart() {
    kill -KILL "${pid_of[$1]}" 2>/dev/null || true
    wait "${pid_of[$1]}" 2>/dev/null || true
    "start_part_$1"
    rm -f "$home/restart/$1"
}

start_control_plane() {
    local user
    make_network
    if [[ ! -d $pki ]]; then
        mkdir -m 700 "$pki"
        make_pki >"$dir/pki.log" 2>&1 || give_up pki "cannot be made"
        for user in controller-manager scheduler proxy node admin; do
            write_kubeconfig "$base/$user.conf" https://127.0.0.1:6443 "$user"
        done
        mv "$base/admin.conf" "$base/kubeconfig"
    fi
    start_part_etcd
    start_part_kube-apiserver
}

trap 'exit 0' INT TERM HUP
mkdir -p "$dir" "$home/restart" "$home/images"
rm -f "$home/ready"
cover
make_cgroups "$cgroup"
if ((number == 1)); then
    start_control_plane
else
    join_network
    make_worker_pki >"$dir/pki.log" 2>&1 || give_up pki "cannot be made"
fi
start_part_containerd
import_images >"$dir/images.log" 2>&1 || give_up images "cannot be imported"
await kube-apiserver kubectl --request-timeout=5s get --raw /readyz
if ((number == 1)); then
    start_part_kube-controller-manager
    start_part_kube-scheduler
fi
start_part_kubelet
start_part_kube-proxy
await kubelet node_is_ready
: >"$home/ready"
while true; do
    sleep 0.2 &
    wait $! || true
    for part in "${parts[@]}"; do
        [[ ! -e $home/restart/$part ]] || restart "$part"
        kill -0 "${pid_of[$part]}" 2>/dev/null || give_up "$part" "has ended"
    done
done
