# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the same for a pod that asks for it by an annotation, with the proxy between kubelet and driver

namespace=default

run_pod() { # run_pod NAME [ANNOTATIONS]: with the claim, on a node that has neither scheduler nor network
    cat >"$1.yaml" <<END
apiVersion: v1
kind: Pod
metadata: {name: $1, annotations: {${2:-}}}
spec:
  runtimeClassName: csi-loopback
  nodeName: node
  hostNetwork: true
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
  securityContext: {fsGroup: 4321, fsGroupChangePolicy: OnRootMismatch}
  containers:
  - {name: app, image: "localhost/busybox:node", imagePullPolicy: Never, volumeMounts: [{name: data, mountPath: /data}]}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
END
    indent <"$1.yaml"
    shell kubectl create -f "$1.yaml"
}

delete_pod() { # delete_pod NAME: and waits until kubelet and driver have nothing of it
    shell kubectl delete pod "$1"
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

check_host() { # check_host NUMBER: of the volumes that the host has mounted for pods
    local mounts
    mounts=$(list_mounts | awk -v at="$node/kubelet/pods/" 'index($1, at) == 1 && $2 ~ "^/dev/loop"' | wc -l)
    printf '    mounted on the host: %d\n' "$mounts"
    ((mounts == $1)) || die "$1 was expected"
}

event() { # what the proxy has reported of the pod
    kubectl get events -o 'jsonpath={.items[0].message}' \
        --field-selector involvedObject.name=waits,source=csi-loopback-node-proxy | grep -F DEFER_FS_OPS
}

begin "${node_commands[@]}" setpriv unshare openssl
start_cluster
apply node-proxy
quietly kubectl create serviceaccount default
say "starting a node with a released kubelet, crust_ops, the driver, and the proxy, whose socket kubelet gets"
start node env CSI_LOOPBACK_BINARY="$driver" "$repo/hack/kubelet.sh" "$tmp/cluster"
node=$tmp/cluster/node
await "the node" test -e "$node/ready"
# The RuntimeClass selects it.
quietly kubectl label node node loopback.csi.local/pool=true
start_crust_ops "$node" nsenter --target "$(<"$node/pid")" --mount --pid -- setpriv --pdeathsig KILL --
deferring=("${driver_flags[@]}")
start_driver
start_role csi-loopback daemonset/csi-loopback-node-proxy node-proxy "--endpoint=unix://$tmp/proxy.sock" \
    "--driver-endpoint=unix://$tmp/csi.sock" "--state-dir=$tmp/state"
start registrar node-driver-registrar -driver-name="$driver_name" -kubelet-registration-path="$tmp/proxy.sock" \
    -plugin-registration-path="$node/kubelet/plugins_registry"
await "the registration" kubectl wait --timeout=1s --for=jsonpath='{.spec.drivers[0].name}'="$driver_name" csinode/node
say "a volume that does not mention runtimes, and its claim"
show volume create "$volume" --size 320Mi --fs xfs --access-mode single-node-single-writer
make_claim 320Mi ReadWriteOncePod Filesystem
say "a pod without the annotation: the host mounts its volume"
run_pod plain
wait_for pod/plain condition=Ready
in_pod plain 'echo "written in plain" >/data/file; grep " /data " /proc/mounts'
check_host 1
delete_pod plain
say "a pod with the annotation: its runtime mounts it, and the host does not"
run_pod deferred 'cbt.storage.k8s.io/defer-fs-mount: data'
wait_for pod/deferred condition=Ready
in_pod deferred 'cat /data/file; echo "written in deferred" >>/data/file; grep " /data " /proc/mounts; stat -c "group %g" /data'
check_host 0
say "what the proxy stores while the pod is there, and counts"
shell jq . "$tmp"/state/*/vol_data.json
shell curl --silent --fail "http://127.0.0.1:$http/metrics" | grep -E '^ *(volumes_published_with_|csi_loopback_deferred_)'
delete_pod deferred
[[ -z $(find "$tmp/state" -name vol_data.json) ]] || die "it is still stored"
say "the driver is downgraded, and a pod begins: it waits, and an event reports why"
stop driver
driver_flags=()
start_driver
run_pod waits 'cbt.storage.k8s.io/defer-fs-mount: data'
await "an event" event
event | fold --spaces --width 116 | indent
say "with the upgrade it runs"
stop driver
driver_flags=("${deferring[@]}")
start_driver
wait_for pod/waits condition=Ready
in_pod waits 'cat /data/file'
check_host 0
delete_pod waits
remove_volume
