#!/usr/bin/env bash
# hack/demo-node-proxy.sh: a pod that has its volume mounted by its runtime since it says so (KEP-2857), on one machine with a real API
# server and a released kubelet, which knows nothing of that: the node proxy stands between it and the driver, with the rights that
# deploy/node-proxy gives it. Starts a cluster of one node (hack/cluster.sh, hack/kubelet.sh), crust_ops, a driver and the proxy; runs
# a pod as ever and one with the annotation, for the same claim; shows what the host sees of each, what is remembered and counted; has the
# driver downgraded while a pod begins, and upgraded. Leaves nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN      the binary to show; without it, the one of this tree is built
# Needs root, containerd and runc. The first run builds the parts of Kubernetes, which takes minutes.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"
# shellcheck source=hack/cluster-stage.sh
source "$(dirname "$0")/cluster-stage.sh"

namespace="proxy-demo"
proxy=csi-loopback-node-proxy
bytes=$((320 << 20))
# Of the proxy's metrics; kubelet's, which runs commands in containers.
http=0 port=0

# Kubelet takes the pods' volumes away, the driver the rest.
take_down() {
    local how=$1 deadline=$((SECONDS + 30))
    if [[ -e $tmp/cluster/node/ready ]]; then
        quietly kubectl -n "$namespace" delete pods --all --now --wait=false
        while [[ -n $(ls -A "$tmp/cluster/node/kubelet/pods" 2>/dev/null) ]] && ((SECONDS < deadline)); do
            sleep 0.1
        done
        while [[ -n $(loops_of "$tmp" | awk -v of="vol-$volume-" 'index($2, of)') ]] && ((SECONDS < deadline)); do
            sleep 0.1
        done
    fi
    "$how" "$driver" volume delete "$volume" --timeout 30s
}

install() {
    kubectl apply --server-side -f "$repo/deploy/base/csi-driver.yaml"
    kubectl create namespace csi-loopback
    tell kubectl -n csi-loopback apply -f deploy/node-proxy/proxy/rbac.yaml
    kubectl -n csi-loopback apply -f "$repo/deploy/node-proxy/proxy/rbac.yaml"
    kubectl create namespace "$namespace"
    kubectl -n "$namespace" create serviceaccount default
    kubectl apply -f - <<END
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: csi-loopback}
handler: csi-loopback
END
}

start_node() {
    start node env CSI_LOOPBACK_BINARY="$driver" "$repo/hack/kubelet.sh" "$tmp/cluster"
    until_so 120 "the node" test -e "$tmp/cluster/node/ready"
    port=$(<"$tmp/cluster/node/port")
}

# Where the runtime runs.
start_crust_ops() {
    start crust-ops nsenter --target "$(<"$tmp/cluster/node/pid")" --mount --pid -- setpriv --pdeathsig KILL -- \
        "$driver" --mode runtime-ops --endpoint "unix://$tmp/crust.sock" --crust-dir "$tmp/cluster/node/crust" \
        --cli-env "CSI_LOOPBACK_RUNC_CONFIG=$tmp/cluster/node/oci-runtime.yaml" --collect-every 1s
    until_so 30 crust_ops test -S "$tmp/crust.sock"
}

start_proxy() {
    http=$(free_port)
    tell csi-loopback --mode node-proxy --endpoint "$tmp/proxy.sock" --driver-endpoint "$tmp/csi.sock" --node-name node
    (umask 077 && kubeconfig_of csi-loopback "$proxy")
    start node-proxy "$driver" --mode node-proxy --endpoint "unix://$tmp/proxy.sock" \
        --driver-endpoint "unix://$tmp/csi.sock" --node-name node --state-dir "$tmp/state" --collect-every 1s \
        --http-endpoint "127.0.0.1:$http" --kubeconfig "$tmp/$proxy.kubeconfig"
    until_so 30 "the proxy" test -S "$tmp/proxy.sock"
    start registrar "$tmp/cluster/tools/node-driver-registrar" -driver-name="$driver_name" \
        -kubelet-registration-path="$tmp/proxy.sock" \
        -plugin-registration-path="$tmp/cluster/node/kubelet/plugins_registry"
    until_so 30 "the registration" registered
}

registered() { [[ $(kubectl get csinode node -o 'jsonpath={.spec.drivers[*].name}') == *"$driver_name"* ]]; }

# change_driver FLAG...: another version of it in the place of the one that runs.
change_driver() {
    local index
    for index in "${!running[@]}"; do
        [[ ${running[index]} != "$driver_pid" ]] || unset 'running[index]'
    done
    running=("${running[@]}")
    stop "$driver_pid" 30
    driver_flags=("$@")
    start_driver
}

# No controller makes volumes for claims here, nor binds them.
make_claimed_volume() {
    local uid common='accessModes: [ReadWriteOncePod], volumeMode: Filesystem, storageClassName: ""'
    show volume create "$volume" --size 320Mi --fs xfs --access-mode single-node-single-writer
    volume_id=$("$driver" volume list --output json | jq -r '.[0].id')
    kubectl apply -f - >/dev/null <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: $namespace}
spec: {$common, volumeName: pv-data, resources: {requests: {storage: $bytes}}}
END
    uid=$(kubectl -n "$namespace" get pvc data -o 'jsonpath={.metadata.uid}')
    kubectl apply -f - >/dev/null <<END
apiVersion: v1
kind: PersistentVolume
metadata: {name: pv-data}
spec:
  {$common, persistentVolumeReclaimPolicy: Retain, capacity: {storage: $bytes},
   csi: {driver: $driver_name, volumeHandle: $volume_id, fsType: xfs},
   claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: $namespace, name: data, uid: $uid}}
END
    kubectl patch pv pv-data --subresource=status --type=merge -p '{"status":{"phase":"Bound"}}' >/dev/null
    kubectl -n "$namespace" patch pvc data --subresource=status --type=merge \
        -p '{"status":{"phase":"Bound","capacity":{"storage":"'"$bytes"'"}}}' >/dev/null
}

create() { # create NAME [ANNOTATIONS]: a pod with the claim, which is told
    cat >"$tmp/$1.yaml" <<END
apiVersion: v1
kind: Pod
metadata: {name: $1, namespace: $namespace${2:+, annotations: {$2\}}}
spec:
  runtimeClassName: csi-loopback
  securityContext: {fsGroup: 4321, fsGroupChangePolicy: OnRootMismatch}
  containers:
  - {name: app, image: "localhost/busybox:node", volumeMounts: [{name: data, mountPath: /data}]}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
END
    sed 's/^/    /' "$tmp/$1.yaml"
    tell kubectl create -f "$1.yaml"
    # What it needs of this node: there are neither scheduler nor network.
    sed -e '/^spec:/a \  nodeName: node\n  hostNetwork: true\n  automountServiceAccountToken: false\n  terminationGracePeriodSeconds: 0' \
        -e 's/localhost.busybox:node"/&, imagePullPolicy: Never/' "$tmp/$1.yaml" | kubectl create -f - | sed 's/^/    /'
}

await_pod() { # await_pod NAME
    until_so 60 "pod $1" kubectl -n "$namespace" wait --timeout=1s --for=condition=Ready "pod/$1"
}

delete() { # delete NAME: and waits until kubelet and driver have nothing of it
    tell kubectl -n "$namespace" delete pod "$1"
    kubectl -n "$namespace" delete pod "$1" | sed 's/^/    /'
    until_so 60 "the end of its volume" nothing_left
}

nothing_left() {
    [[ -z $(ls -A "$tmp/cluster/node/kubelet/pods") && -z $(loops_of "$tmp" | awk -v of="vol-$volume-" 'index($2, of)') ]]
}

in_pod() { # in_pod NAME SCRIPT: in its container
    local encoded
    printf '%s    %s # %s%s\n' "$dim" "$1" "$2" "$plain"
    # Kubelet cuts the command at each space.
    encoded=$(printf '%s' "$2" | base64 -w0)
    encoded=$(jq -rn --arg it "sh -c echo\${IFS}$encoded|base64\${IFS}-d|sh" '$it | @uri')
    kubectl --server="https://127.0.0.1:$port" create --raw "/run/$namespace/$1/app?cmd=$encoded" -f /dev/null |
        sed 's/^/    /'
}

on_the_host() { # what of the volume is mounted on the host, where pods have it
    list_mounts | awk -v at="$tmp/cluster/node/kubelet/pods/" 'index($1, at) == 1 && $2 ~ "^/dev/loop" { print $2 }'
}

metrics() { # metrics WORDS: the proxy's numbers that begin with them
    tell curl "http://127.0.0.1:$http/metrics"
    curl --silent --fail "http://127.0.0.1:$http/metrics" | grep -E "^($1)" | sed 's/^/    /'
}

begin_demo "${storage_commands[@]}" "${node_commands[@]}" setsid setpriv unshare jq curl openssl

say "starting an API server and a node with a released kubelet, in \$tmp ($tmp)"
start_cluster
install | sed 's/^[^ ]/    &/'
start_node
say "crust_ops, the driver, and the proxy in front of it, whose socket kubelet is told of"
start_crust_ops
flags=(--enable-defer-fs-ops --crust-endpoint "unix://$tmp/crust.sock")
driver_flags=("${flags[@]}")
start_driver
start_proxy

say "a volume that knows nothing of runtimes, and its claim"
make_claimed_volume

say "a pod that says nothing: the host mounts its volume, as ever"
create plain
await_pod plain
in_pod plain 'echo "written in plain" >/data/file; grep " /data " /proc/mounts'
[[ -n $(on_the_host) ]] || die "the host has not mounted it"
printf '    mounted on the host: %s\n' "$(on_the_host)"
delete plain

say "the same with the annotation: its runtime mounts it, and the host does not"
create deferred 'cbt.storage.k8s.io/defer-fs-mount: data'
await_pod deferred
in_pod deferred 'cat /data/file; echo "written in deferred" >>/data/file; grep " /data " /proc/mounts; stat -c "group %g" /data'
[[ -z $(on_the_host) ]] || die "the host has mounted it: $(on_the_host)"
printf '    mounted on the host: nothing\n'
say "what the proxy remembers of it, as long as it is there, and counts"
tell cat "\$tmp/state/*/vol_data.json"
jq . "$tmp"/state/*/vol_data.json | sed "s|$tmp|\$tmp|g; s/^/    /"
metrics 'volumes_published_with_deferred_ops_total|csi_loopback_deferred_volumes'
delete deferred
[[ -z $(find "$tmp/state" -name vol_data.json) ]] || die "it is still remembered"

say "the driver is downgraded, and a pod begins: it waits, and is told why"
change_driver
create waits 'cbt.storage.k8s.io/defer-fs-mount: data'
told() { [[ $(events) == *DEFER_FS_OPS* ]]; }
events() {
    kubectl -n "$namespace" get events --field-selector involvedObject.name=waits,reason=FailedMount -o json |
        jq -r '[.items[] | select(.source.component == "'"$proxy"'")][0] | "\(.type) \(.reason) \(.source.component): \(.message)"'
}
until_so 30 "an event" told
tell kubectl -n "$namespace" events --for pod/waits
events | fold --spaces --width 116 | sed 's/^/    /'
say "with the upgrade it runs"
change_driver "${flags[@]}"
await_pod waits
in_pod waits 'cat /data/file'
[[ -z $(on_the_host) ]] || die "the host has mounted it: $(on_the_host)"
printf '    mounted on the host: nothing\n'
delete waits

say "taking everything down"
take_down run
end_demo
