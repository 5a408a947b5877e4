# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the same for a pod with the opt-in annotation, with the node proxy

namespace=default

run_pod() { # run_pod NAME [ANNOTATIONS]: creates a pod with the claim, on a node without scheduler and network plugin
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

delete_pod() { # delete_pod NAME: deletes the pod and waits until kubelet and driver have released its volume
    shell kubectl delete pod "$1"
    await "release of the volume" is_unused
}

is_unused() { [[ -z $(ls -A "$node/kubelet/pods") && $(loops_of "$tmp") != *"/vol-$volume-"* ]]; }

in_pod() { # in_pod NAME SCRIPT: runs the script through kubelet, which splits a command at spaces
    local command
    print_command "kubectl exec $1 -- sh -c '$2'"
    command="sh -c echo\${IFS}$(base64 -w0 <<<"$2")|base64\${IFS}-d|sh"
    kubectl --server="https://127.0.0.1:$(<"$node/port")" create -f /dev/null \
        --raw "/run/$namespace/$1/app?cmd=$(jq -rn --arg command "$command" '$command | @uri')" | indent
}

check_host() { # check_host NUMBER: checks the number of pod volumes that the host has mounted
    local mounts
    mounts=$(list_mounts | awk -v at="$node/kubelet/pods/" 'index($1, at) == 1 && $2 ~ "^/dev/loop"' | wc -l)
    printf '    mounted on the host: %d\n' "$mounts"
    ((mounts == $1)) || die "expected $1"
}

event() { # prints the proxy's event for the pod
    kubectl get events -o 'jsonpath={.items[0].message}' \
        --field-selector involvedObject.name=waits,source=csi-loopback-node-proxy | grep -F DEFER_FS_OPS
}

begin "${node_commands[@]}" setpriv unshare openssl
start_cluster
apply node-proxy
quietly kubectl create serviceaccount default
say "starting a node with a released kubelet, crust_ops, the driver, and the node proxy, registered with kubelet"
start node env CSI_LOOPBACK_BINARY="$driver" "$repo/hack/kubelet.sh" "$tmp/cluster"
node=$tmp/cluster/node
await "the node" test -e "$node/ready"
# The RuntimeClass selects nodes with this label.
quietly kubectl label node node loopback.csi.local/pool=true
start_crust_ops "$node" nsenter --target "$(<"$node/pid")" --mount --pid -- setpriv --pdeathsig KILL --
deferring=("${driver_flags[@]}")
start_driver
start_role csi-loopback daemonset/csi-loopback-node-proxy node-proxy "--endpoint=unix://$tmp/proxy.sock" \
    "--driver-endpoint=unix://$tmp/csi.sock" "--state-dir=$tmp/state"
start registrar node-driver-registrar -driver-name="$driver_name" -kubelet-registration-path="$tmp/proxy.sock" \
    -plugin-registration-path="$node/kubelet/plugins_registry"
await "the registration" kubectl wait --timeout=1s --for=jsonpath='{.spec.drivers[0].name}'="$driver_name" csinode/node
say "creating an ordinary volume and its claim"
show volume create "$volume" --size 320Mi --fs xfs --access-mode single-node-single-writer
make_claim 320Mi ReadWriteOncePod Filesystem
say "running a pod without the annotation: the host mounts its volume"
run_pod plain
wait_for pod/plain condition=Ready
in_pod plain 'echo "written in plain" >/data/file; grep " /data " /proc/mounts'
check_host 1
delete_pod plain
say "running a pod with the annotation: its runtime mounts the volume, the host does not"
run_pod deferred 'cbt.storage.k8s.io/defer-fs-mount: data'
wait_for pod/deferred condition=Ready
in_pod deferred 'cat /data/file; echo "written in deferred" >>/data/file; grep " /data " /proc/mounts; stat -c "group %g" /data'
check_host 0
say "showing the proxy's stored state of the volume, and its metrics"
shell jq . "$tmp"/state/*/vol_data.json
shell curl --silent --fail "http://127.0.0.1:$http/metrics" | grep -E '^ *(volumes_published_with_|csi_loopback_deferred_)'
delete_pod deferred
[[ -z $(find "$tmp/state" -name vol_data.json) ]] || die "the state was not deleted"
say "downgrading the driver and creating a pod: it waits, and an event gives the reason"
stop driver
driver_flags=()
start_driver
run_pod waits 'cbt.storage.k8s.io/defer-fs-mount: data'
await "an event" event
event | fold --spaces --width 116 | indent
say "upgrading the driver: the pod runs"
stop driver
driver_flags=("${deferring[@]}")
start_driver
wait_for pod/waits condition=Ready
in_pod waits 'cat /data/file'
check_host 0
delete_pod waits
remove_volume
