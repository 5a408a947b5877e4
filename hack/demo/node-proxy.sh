# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the same for a pod that asks for it by an annotation, with the proxy between kubelet and driver

namespace="proxy-demo"
node=

start_node() {
    start node env CSI_LOOPBACK_BINARY="$driver" "$repo/hack/kubelet.sh" "$tmp/cluster"
    node=$tmp/cluster/node
    await "the node" test -e "$node/ready"
}

start_proxy() {
    local socket=$tmp/proxy.sock
    free_ports
    start_role csi-loopback daemonset/csi-loopback-node-proxy node-proxy "--endpoint=unix://$socket" \
        "--driver-endpoint=unix://$tmp/csi.sock" "--state-dir=$tmp/state"
    await "the proxy" test -S "$socket"
    start registrar node-driver-registrar -driver-name="$driver_name" -kubelet-registration-path="$socket" \
        -plugin-registration-path="$node/kubelet/plugins_registry"
    await "the registration" is_registered
}

is_registered() { [[ $(kubectl get csinode node -o 'jsonpath={.spec.drivers[*].name}') == *"$driver_name"* ]]; }

change_driver() { # change_driver FLAG...: a driver of another version in its place
    stop_started driver
    driver_flags=("$@")
    start_driver
}

run_pod() { # run_pod NAME [ANNOTATIONS]: a pod with the claim
    cat >"$1.yaml" <<END
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
    indent <"$1.yaml"
    # What it needs of this node, which has neither scheduler nor network.
    cat >>"$1.yaml" <<END
  nodeName: node
  hostNetwork: true
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
END
    sed -i 's/busybox:node"/&, imagePullPolicy: Never/' "$1.yaml"
    shell kubectl create -f "$1.yaml"
}

await_pod() { await "pod $1" kubectl -n "$namespace" wait --timeout=1s --for=condition=Ready "pod/$1"; }

delete_pod() { # delete_pod NAME: and waits until kubelet and driver have nothing of it
    shell kubectl -n "$namespace" delete pod "$1"
    await "the end of its volume" is_unused
}

is_unused() { [[ -z $(ls -A "$node/kubelet/pods") && $(loops_of "$tmp") != *"/vol-$volume-"* ]]; }

in_pod() { # in_pod NAME SCRIPT: by kubelet, which splits the command at each space
    local command
    tell "kubectl exec $1 -- sh -c '$2'"
    command="sh -c echo\${IFS}$(base64 -w0 <<<"$2")|base64\${IFS}-d|sh"
    kubectl --server="https://127.0.0.1:$(<"$node/port")" create -f /dev/null \
        --raw "/run/$namespace/$1/app?cmd=$(jq -rn --arg command "$command" '$command | @uri')" | indent
}

# mounted: the devices that the host has mounted for pods.
mounted() {
    list_mounts | awk -v at="$node/kubelet/pods/" 'index($1, at) == 1 && $2 ~ "^/dev/loop" { print $2 }'
}

is_unseen() {
    [[ -z $(mounted) ]] || die "the host has mounted it: $(mounted)"
    echo "    mounted on the host: nothing"
}

events() {
    kubectl -n "$namespace" get events --field-selector involvedObject.name=waits,reason=FailedMount -o json |
        jq -r '.items[] | select(.source.component == "csi-loopback-node-proxy") | .message' | head -n 1
}

is_reported() { [[ $(events) == *DEFER_FS_OPS* ]]; }

begin "${node_commands[@]}" setpriv unshare curl openssl
start_cluster
apply node-proxy
kubectl create namespace "$namespace"
kubectl -n "$namespace" create serviceaccount default
say "starting a node with a released kubelet, crust_ops, the driver, and the proxy, whose socket kubelet gets"
start_node
# The RuntimeClass selects it.
kubectl label node node loopback.csi.local/pool=true
start_crust_ops "$node" nsenter --target "$(<"$node/pid")" --mount --pid -- setpriv --pdeathsig KILL --
driver_flags=("${deferring[@]}")
start_driver
start_proxy

say "a volume that does not mention runtimes, and its claim"
show volume create "$volume" --size 320Mi --fs xfs --access-mode single-node-single-writer
make_claim 320Mi ReadWriteOncePod Filesystem

say "a pod without the annotation: the host mounts its volume"
run_pod plain
await_pod plain
in_pod plain 'echo "written in plain" >/data/file; grep " /data " /proc/mounts'
[[ -n $(mounted) ]] || die "the host has not mounted it"
printf '    mounted on the host: %s\n' "$(mounted)"
delete_pod plain

say "a pod with the annotation: its runtime mounts it, and the host does not"
run_pod deferred 'cbt.storage.k8s.io/defer-fs-mount: data'
await_pod deferred
in_pod deferred 'cat /data/file; echo "written in deferred" >>/data/file; grep " /data " /proc/mounts; stat -c "group %g" /data'
is_unseen
say "what the proxy stores while the pod is there, and counts"
shell jq . "$tmp"/state/*/vol_data.json
tell curl "http://127.0.0.1:$http/metrics"
curl --silent --fail "http://127.0.0.1:$http/metrics" |
    grep -E '^(volumes_published_with_deferred_ops_total|csi_loopback_deferred_volumes)' | indent
delete_pod deferred
[[ -z $(find "$tmp/state" -name vol_data.json) ]] || die "it is still stored"

say "the driver is downgraded, and a pod begins: it waits, and an event reports why"
change_driver
run_pod waits 'cbt.storage.k8s.io/defer-fs-mount: data'
await "an event" is_reported
events | fold --spaces --width 116 | indent
say "with the upgrade it runs"
change_driver "${deferring[@]}"
await_pod waits
in_pod waits 'cat /data/file'
is_unseen
delete_pod waits
remove_volume
