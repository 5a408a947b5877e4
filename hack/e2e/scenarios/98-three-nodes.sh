#!/usr/bin/env bash
# Scenario: three nodes (deploy/overlays/distributed): placement, deltas at either front, failures, intruders, backup and restore, a node that is gone
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

nodes=(node node-2 node-3)
work=$e2e/three-nodes

clean_up() {
    kubectl delete --ignore-not-found --wait=false namespace s3 >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT

# pod_of COMPONENT NODE FIELD: a field of the status of the component's pod on a node.
pod_of() {
    kubectl -n csi-loopback get pods --selector "app.kubernetes.io/component=$1" --field-selector "spec.nodeName=$2" \
        -o jsonpath="{.items[0].$3}"
}

# pinned NAME NODE SIZE: a claim, and a pod that uses it on a node; an empty NODE is any. The pod is not awaited.
pinned() {
    claim "$1" "$3"
    pod_with "$1" "$1" "$2"
}

# delta NAME [ARGUMENT...]: the number of extents that changed between the snapshots NAME-1 and NAME-2, with TLS and token of the
# published service.
delta() {
    client snapshot delta "$1-1" "$1-2" --namespace "$namespace" --token-file=/var/run/secrets/snapshot-metadata/token \
        --output json "${@:2}" | jq '.extents | length'
}

# status_at NODE TOKEN: the gRPC status of CSI's GetMetadataAllocated at the sidecar of a node, without a check of its certificate.
status_at() {
    printf '\0\0\0\0\003\012\001x' | in_network curl --silent --insecure --http2 --max-time 20 --data-binary @- --output /dev/null \
        --dump-header - --header 'content-type: application/grpc' --header 'te: trailers' ${2:+--header "authorization: Bearer $2"} \
        "https://$(pod_of node-metadata "$1" status.podIP):50051/csi.v1.SnapshotMetadata/GetMetadataAllocated" |
        tr -d '\r' | sed -n 's/^grpc-status: //p'
}

# change_snapshot_controller FILTER: changes its arguments. No pod with the former ones runs on: it would handle new snapshots.
change_snapshot_controller() {
    local selector=app.kubernetes.io/name=snapshot-controller
    quietly kubectl -n kube-system scale deployment snapshot-controller --replicas=0
    await delete -n kube-system pod --selector "$selector"
    kubectl -n kube-system get deployment snapshot-controller -o json |
        jq ".spec.template.spec.containers[0].args $1 | .spec.replicas = 2" | quietly kubectl replace -f -
    await create -n kube-system pod --selector "$selector"
    await condition=Ready -n kube-system pod --selector "$selector"
}

token() { kubectl -n "$1" create token "$2" --audience "$3"; } # token NAMESPACE ACCOUNT AUDIENCE

step "two more machines; the snapshot-controller with --enable-distributed-snapshotting"
mkdir -p "$work"
start_worker 2 &
second=$!
start_worker 3
wait "$second"
kubectl get clusterrole snapshot-controller-runner -o json |
    jq '.rules += [{apiGroups: [""], resources: ["nodes"], verbs: ["get", "list", "watch"]}]' | quietly kubectl replace -f -
change_snapshot_controller '+= ["--enable-distributed-snapshotting"]'

step "definitions, labels, deploy/overlays/distributed with pools of 1 GiB, session manager, aggregated API"
quietly kubectl apply --server-side -f deploy/crds
kubectl get crd snapshotmetadataservices.cbt.storage.k8s.io >/dev/null 2>&1 || quietly kubectl create -f deploy/crds-upstream
for node in "${nodes[@]}"; do quietly kubectl label --overwrite node "$node" loopback.csi.local/pool=true; done
quietly overlay_of distributed overlays/distributed cbt-http-nodes
cat >>"$overlay/distributed/kustomization.yaml" <<END
patches:
  - target: {kind: DaemonSet, name: csi-loopback\$}
    patch: |-
      - {op: test, path: /spec/template/spec/containers/3/name, value: driver}
      - {op: add, path: /spec/template/spec/containers/3/args/-, value: --pool=image}
      - {op: add, path: /spec/template/spec/containers/3/args/-, value: --pool-size=1Gi}
      - {op: add, path: /spec/template/spec/containers/3/args/-, value: --overcommit=4}
      # The first stream of each driver pauses, longer than sidecars drain.
      - {op: add, path: /spec/template/spec/containers/3/args/-, value: --enable-faults}
      - {op: add, path: /spec/template/spec/containers/3/args/-, value: "--fault=stream-stall,after=1,for=40s,times=1"}
END
quietly kubectl apply --server-side -k "$overlay/distributed"
quietly kubectl apply --server-side -k deploy/session-manager
quietly kubectl apply --server-side -k deploy/aggregated-api
rollout csi-loopback daemonset/csi-loopback daemonset/csi-loopback-node-metadata deployment/csi-loopback-metadata
rollout csi-loopback-sessions deployment/csi-loopback-session-manager
rollout csi-loopback-aggregated deployment/csi-loopback-aggregated-api
await condition=EndpointReachable driverdiscovery/loopback.csi.local
# On a node that stays.
sed 's/^  serviceAccountName: client$/&\n  nodeName: node/' hack/e2e/client.yaml | apply
quietly kubectl create namespace "$namespace"
await condition=Ready -n backup-client pod/client

step "a volume with two snapshots on each node"
for node in "${nodes[@]}"; do pinned "data-$node" "$node" 64Mi; done
for node in "${nodes[@]}"; do await condition=Ready -n "$namespace" "pod/data-$node"; done
for node in "${nodes[@]}"; do snapshot "data-$node-1" "data-$node"; done
for node in "${nodes[@]}"; do in_pod "data-$node" "hostname >/data/file; head -c 1048576 /dev/urandom >/data/more; sync -f /data"; done
for node in "${nodes[@]}"; do
    snapshot "data-$node-2" "data-$node"
    content=$(kubectl -n "$namespace" get volumesnapshot "data-$node-2" -o jsonpath='{.status.boundVolumeSnapshotContentName}')
    equal "node of $content" "$node" \
        "$(kubectl get volumesnapshotcontent "$content" -o jsonpath='{.metadata.labels.snapshot\.storage\.kubernetes\.io/managed-by}')"
done

step "a rolling restart of fronts and nodes under open streams: each is complete, and no other call fails"
streams=()
for node in "${nodes[@]}"; do
    delta "data-$node" >"$work/$node" &
    streams+=($!)
done
fronts() { kubectl -n csi-loopback get pods --selector app.kubernetes.io/component=metadata -o jsonpath='{range .items[*]}{.status.podIP}{"\n"}{end}'; }
open_streams() {
    local front
    for front in $(fronts); do in_network curl --silent --fail "http://$front:8080/metrics"; done |
        awk '/^csi_loopback_sidecar_streams_open / { sum += $2 } END { print sum }'
}
all_are_open() { [[ $(open_streams) == "${#nodes[@]}" ]]; }
eventually all_are_open
# The fronts are on nodes that stay.
quietly kubectl cordon node-3
# No rollout leaves a node without a ready sidecar.
quietly kubectl -n csi-loopback rollout restart deployment/csi-loopback-metadata daemonset/csi-loopback-node-metadata
ends=$((SECONDS + 20)) calls=0
while ((SECONDS < ends)); do
    for node in "${nodes[@]}"; do (($(delta "data-$node") > 0)); done
    calls=$((calls + 3))
done
rollout csi-loopback deployment/csi-loopback-metadata daemonset/csi-loopback-node-metadata
# The former pods end after the rollout.
none_terminates() { [[ $(kubectl -n csi-loopback get pods -o jsonpath='[{.items[*].metadata.deletionTimestamp}]') == "[]" ]]; }
eventually none_terminates
quietly kubectl uncordon node-3
for stream in "${streams[@]}"; do wait "$stream"; done
for node in "${nodes[@]}"; do equal "extents of data-$node" "$(delta "data-$node")" "$(<"$work/$node")"; done
step "$calls other calls succeeded"

step "deltas of all nodes at either front"
mapfile -t addresses < <(fronts)
equal "number of fronts" 2 "${#addresses[@]}"
for front in "${addresses[@]}"; do
    for node in "${nodes[@]}"; do (($(delta "data-$node" --address "$front:50051") > 0)); done
done

step "the same by SnapshotMetadata, sessions and the aggregated API"
for node in "${nodes[@]}"; do [[ -n $(extents delta "data-$node-1" "data-$node-2") ]]; done

step "intruders at a node: no token, a forged one, of a user, of another node, of the front for clients; and the right one"
driver=loopback.csi.local
equal "no token" 16 "$(status_at node-2 "")"
equal "a forged token" 16 "$(status_at node-2 forged)"
equal "a user's token" 7 "$(status_at node-2 "$(token backup-client client "$driver/node-2")")"
equal "a user's token for the front" 16 "$(status_at node-2 "$(token backup-client client snapshot-metadata.loopback.csi.local)")"
equal "the front's token for another node" 16 "$(status_at node-2 "$(token csi-loopback csi-loopback-front "$driver/node-3")")"
# It reaches the driver, which has no snapshot "x".
equal "the front's token" 5 "$(status_at node-2 "$(token csi-loopback csi-loopback-front "$driver/node-2")")"

step "group snapshots are refused with the reason"
refused "has a pool on each node" apply <<END
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshotClass
metadata: {name: distributed}
driver: loopback.csi.local
deletionPolicy: Delete
END

step "a volume grows on its node; the scheduler places by room; a pending claim is placed when there is room again"
claim grown 64Mi "volumeMode: Block"
user grown grown
quietly kubectl -n "$namespace" patch pvc grown --type merge -p '{"spec": {"resources": {"requests": {"storage": "128Mi"}}}}'
await jsonpath='{.status.capacity.storage}=128Mi' -n "$namespace" pvc/grown
equal "bytes of the device" 134217728 "$(in_pod grown 'blockdev --getsize64 /device')"
discard -n "$namespace" pod/grown pvc/grown
for node in node node-2; do pinned "filler-$node" "$node" 3500Mi; done
for node in node node-2; do await condition=Ready -n "$namespace" "pod/filler-$node"; done
pinned placed "" 1Gi
await condition=Ready -n "$namespace" pod/placed
equal "node of the pod placed" node-3 "$(kubectl -n "$namespace" get pod placed -o jsonpath='{.spec.nodeName}')"
for name in filler-node filler-node-2 placed; do discard -n "$namespace" "pod/$name" "pvc/$name"; done

step "a node without a network, and with it again"
disconnect_node 3
# Pings end the call within 20 s.
refused "node node-3, which holds the snapshot, cannot be reached" delta data-node-3 --timeout 30s
(($(delta data-node-2) > 0))
connect_node 3
came_back() { (($(delta data-node-3 --timeout 10s) > 0)); }
eventually came_back

step "a node without a sidecar; another node that pretends to be it"
quietly kubectl label node node-3 loopback.csi.local/pool-
sidecar_is_gone() { [[ -z $(kubectl -n csi-loopback get pods --selector app.kubernetes.io/component=node-metadata --field-selector spec.nodeName=node-3 -o name) ]]; }
eventually sidecar_is_gone
refused "node-3, which holds the snapshot, cannot be reached: it has no ready sidecar" delta data-node-3 --timeout 5s
pretends() {
    apply <<END
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: forged, namespace: csi-loopback, labels: {kubernetes.io/service-name: csi-loopback-nodes}}
addressType: IPv4
ports: [{name: node-metadata, port: 50051, protocol: TCP}]
endpoints: [{addresses: ["$(pod_of node-metadata node-2 status.podIP)"], nodeName: node-3, conditions: {ready: true}}]
END
}
pretends
refused 'not valid for name "node-3"' delta data-node-3 --timeout 5s
quietly kubectl -n csi-loopback delete endpointslice forged
quietly kubectl label node node-3 loopback.csi.local/pool=true
eventually came_back

step "a backup of all nodes' volumes through one address; restore of one on another node"
s3_server s3
quietly kubectl apply --server-side -k deploy/examples/mover
quietly kubectl -n "$namespace" create secret generic s3 --from-literal=AWS_ENDPOINT_URL=http://s3.s3.svc:9000 --from-literal=AWS_ALLOW_HTTP=true \
    --from-literal=AWS_REGION=us-east-1 --from-literal=AWS_ACCESS_KEY_ID=local --from-literal=AWS_SECRET_ACCESS_KEY=not-a-real-key
to_s3() { client "$@" --namespace "$namespace" --repository s3://backups/all --s3-secret s3 --quiet; }
for node in "${nodes[@]}"; do quietly to_s3 backup create "data-$node-1"; done
for node in "${nodes[@]}"; do
    made=$(to_s3 backup create "data-$node-2" --output json)
    equal "kind of data-$node-2" incremental "$(jq -r .kind <<<"$made")"
done
expected=$(in_pod data-node-3 'cd /data && sha256sum file more')
cat >"$work/on-node.json" <<'END'
{"spec": {"nodeSelector": {"kubernetes.io/hostname": "node"}}}
END
kubectl -n backup-client exec -i client -- sh -c 'cat >/tmp/template.json' <"$work/on-node.json"
quietly to_s3 restore data-node-3-2 --to-claim restored --storage-class csi-loopback --volume-mode filesystem --pod-template /tmp/template.json
user restored restored
equal "node of the restored claim" node "$(kubectl -n "$namespace" get pod restored -o jsonpath='{.spec.nodeName}')"
equal "content of the restored claim" "$expected" "$(in_pod restored 'cd /data && sha256sum file more')"

step "a node is gone: its snapshots are not found, and node forget removes its objects"
on_node cat "/proc/$(process_of csi-loopback "$(pod_of node-metadata node metadata.name)" metadata)/exe" >"$work/program"
chmod +x "$work/program"
forget() { in_network "$work/program" node forget node-3 --kubeconfig "$e2e/kubeconfig" --output json "$@"; }
refused "kubectl delete node node-3" forget
end_worker 3
quietly kubectl delete node node-3
# What the controllers of Kubernetes do after some minutes.
quietly kubectl delete pods --all-namespaces --field-selector spec.nodeName=node-3 --force --grace-period=0
refused "node node-3, which held the snapshot, no longer exists" delta data-node-3
states() { [[ $(forget "${@:2}" 2>/dev/null | jq -r '[.[] | "\(.kind) \(.state)"] | sort | join(", ")') == "$1" ]]; }
eventually states "PersistentVolume in_use, VolumeSnapshotContent in_use, VolumeSnapshotContent in_use"
quietly kubectl -n "$namespace" delete --wait=false pvc/data-node-3 volumesnapshot/data-node-3-1 volumesnapshot/data-node-3-2
eventually states "PersistentVolume unused, VolumeSnapshotContent unused, VolumeSnapshotContent unused"
quietly forget --confirm
eventually states ""
await delete -n "$namespace" pvc/data-node-3 volumesnapshot/data-node-3-1 volumesnapshot/data-node-3-2
(($(delta data-node-2) > 0))

step "uninstall"
delete namespace/backup-client clusterrole/e2e-client clusterrolebinding/e2e-client
delete namespace "$namespace"
eventually volumes_are_gone
quietly kubectl delete --timeout="${patience}s" snapshotsessionrequests --all --all-namespaces
delete -k deploy/session-manager
delete apiservice v1alpha1.cbt.storage.k8s.io
delete -k deploy/aggregated-api
delete -k "$overlay/distributed"
delete -k deploy/examples/mover
delete snapshotmetadataservice,snapshotserviceconfiguration,driverdiscovery "$driver"
delete -f deploy/crds -f deploy/crds-upstream
change_snapshot_controller '-= ["--enable-distributed-snapshotting"]'
end_worker 2
quietly kubectl delete node node-2
quietly kubectl label node node loopback.csi.local/pool-
on_node rm -r /var/lib/csi-loopback /var/lib/kubelet/plugins/loopback.csi.local
