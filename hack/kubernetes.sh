# shellcheck shell=bash disable=SC2154
# What the Kubernetes of hack/cluster.sh with hack/kubelet.sh and that of hack/e2e.sh have in common: certificates and
# kubeconfigs, etcd, flags of the API server, settings of the machine that kubelet would change, and its configuration.
# Sourced, never run, after hack/parts.sh. The script that sources it sets $pki, the directory of keys and certificates,
# $tools, that of the programs, and $cgroup, that of the node.

# --- Certificates and kubeconfigs -----------------------------------------------------------------

make_ca() { # make_ca NAME
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -keyout "$pki/$1.key" -out "$pki/$1.crt" -subj "/CN=$1"
}

make_certificate() { # make_certificate NAME CA SUBJECT USAGE [NAMES]
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -CA "$pki/$2.crt" -CAkey "$pki/$2.key" -keyout "$pki/$1.key" -out "$pki/$1.crt" -subj "$3" \
        -addext "basicConstraints=critical,CA:FALSE" -addext "extendedKeyUsage=$4" \
        ${5:+-addext "subjectAltName=$5"}
}

write_kubeconfig() { # write_kubeconfig FILE SERVER CERTIFICATE
    cat >"$1" <<END
apiVersion: v1
kind: Config
clusters:
- name: local
  cluster:
    server: $2
    certificate-authority-data: $(base64 -w0 <"$pki/ca.crt")
users:
- name: local
  user:
    client-certificate-data: $(base64 -w0 <"$pki/$3.crt")
    client-key-data: $(base64 -w0 <"$pki/$3.key")
contexts:
- name: local
  context: {cluster: local, user: local}
current-context: local
END
}

# make_cluster_pki NAMES: authorities, and the keys of an API server with these names. An && chain: `set -e` does not apply to
# a function before ||.
make_cluster_pki() {
    # A separate authority for the aggregation layer: its certificates can impersonate every user.
    make_ca ca && make_ca front-proxy-ca &&
        make_certificate apiserver ca /CN=kube-apiserver serverAuth "DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1$1" &&
        make_certificate admin ca /O=system:masters/CN=admin clientAuth &&
        make_certificate front-proxy front-proxy-ca /CN=front-proxy clientAuth &&
        openssl genrsa -out "$pki/sa.key" 2048 &&
        openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub"
}

# --- Control plane --------------------------------------------------------------------------------

# start_etcd SOCKETS DATA: on unix sockets in a directory: private, and without a search for free ports. etcd requires names
# with a port. Returns when it listens: the API server retries only after seconds.
start_etcd() {
    start etcd env --chdir="$1" "$tools/etcd" --name=local --data-dir="$2" --unsafe-no-fsync --log-level=warn \
        --listen-client-urls=unix://client:0 --advertise-client-urls=unix://client:0 \
        --listen-peer-urls=unix://peer:0 --initial-advertise-peer-urls=unix://peer:0 \
        --initial-cluster=local=unix://peer:0
    await etcd test -S "$1/client:0"
}

# start_kube_apiserver SOCKETS FLAG...: the API server of the etcd there, with further flags.
start_kube_apiserver() {
    start kube-apiserver "$tools/kube-apiserver" --etcd-servers="unix://$1/client:0" \
        --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" --client-ca-file="$pki/ca.crt" \
        --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
        --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy \
        --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group \
        --requestheader-username-headers=X-Remote-User \
        --proxy-client-cert-file="$pki/front-proxy.crt" --proxy-client-key-file="$pki/front-proxy.key" \
        --allow-privileged=true --profiling=false "${@:2}"
}

# --- Node -----------------------------------------------------------------------------------------

# hide_machine DIR: mounts copies over what kubelet would change on the machine, and leaves out loop devices: copies of
# other programs' mounts would keep them busy. Those below DIR stay.
hide_machine() {
    local at setting
    while read -r at; do
        umount --lazy "$at" 2>/dev/null || true
    done < <(list_mounts | awk -v dir="${1:+$1/}" '$2 ~ "^/dev/loop" && (dir == "" || index($1, dir) != 1) { print $1 }')
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=755 tmpfs /var/log
    # The values that kubelet writes if the machine has others.
    for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
        at=${setting%=*}
        printf '%s\n' "${setting#*=}" >"/run/${at//\//.}"
        mount --bind "/run/${at//\//.}" "/proc/sys/$at"
    done
}

# kubelet_configuration: prints what the configuration of each kubelet contains.
kubelet_configuration() {
    cat <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
healthzPort: 0
tlsCertFile: $pki/kubelet.crt
tlsPrivateKeyFile: $pki/kubelet.key
# Cgroups of either version, below the cgroup of this node.
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
resolvConf: ""
oomScoreAdj: 0
makeIPTablesUtilChains: false
# Do not evict pods on a full disk, and never delete images, which cannot be pulled again.
evictionHard: {memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}
imageGCHighThresholdPercent: 100
# How often kubelet reconciles the volumes of a pod, and calls the driver again (requiresRepublish).
syncFrequency: 1s
END
}
