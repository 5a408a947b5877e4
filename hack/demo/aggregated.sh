# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the same in pages, with kubectl create and the aggregated API server

server=csi-loopback-aggregated-api
servers=csi-loopback-aggregated
api_service=v1alpha1.cbt.storage.k8s.io

is_discovered() { [[ $(kubectl api-resources --api-group=cbt.storage.k8s.io -o name) == *volumesnapshotdeltas* ]]; }

# page OFFSET LIMIT: creates a VolumeSnapshotDelta, and writes the response to page.json. Without
# --validate=ignore, kubectl reads CustomResourceDefinitions, which needs another right.
page() {
    cat >delta.yaml <<END
apiVersion: cbt.storage.k8s.io/v1alpha1
kind: VolumeSnapshotDelta
metadata: {name: changed}
spec: {baseVolumeSnapshotName: monday, targetVolumeSnapshotName: tuesday, mode: block, offset: $1, limit: $2}
END
    print_command kubectl create --validate=ignore -f delta.yaml -o json "# offset: $1, limit: $2"
    as backup kubectl create --validate=ignore -f delta.yaml -o json >page.json
}

begin
start_cluster
mkdir overlay
deploy=$(realpath --relative-to=overlay "$repo/deploy")
printf '%s\n' "resources: [$deploy/base]" "components: [$deploy/components/cbt-http]" >overlay/kustomization.yaml
shell cat overlay/kustomization.yaml
quietly kubectl apply --server-side -k overlay
apply aggregated-api
quietly kubectl create namespace "$namespace"
quietly kubectl create serviceaccount backup
kubeconfig_of "$namespace" backup
shell kubectl create rolebinding backup --serviceaccount="$namespace:backup" --clusterrole=csi-loopback-snapshot-delta-user
say "starting the driver, csi-snapshotter, the sidecar with cbt-http and the aggregated API server"
cbt=$(free_port)
start_storage "--cbt-http-port=$cbt" "--cbt-http-service-address=localhost:$cbt"
start_role "$servers" "deployment/$server" aggregated-api "--service-address=$server.$servers.svc:443"
# The API server cannot reach cluster IPs; it resolves a Service of type ExternalName.
quietly kubectl -n "$servers" patch service "$server" --type=merge \
    -p '{"spec": {"type": "ExternalName", "externalName": "localhost", "selector": null}}'
quietly kubectl patch apiservice "$api_service" --type=merge -p '{"spec": {"service": {"port": '"$port"'}}}'
await discovery is_discovered
make_stranger volumesnapshotdeltas.cbt.storage.k8s.io
shell kubectl get apiservice "$api_service"
wait_for "driverdiscovery/$driver_name" condition=CapabilityPresent
shell kubectl get driverdiscoveries
take_snapshots
say "getting a page of three blocks as a ServiceAccount with the ClusterRole csi-loopback-snapshot-delta-user"
page 0 3
indent <delta.yaml
jq .status page.json | indent
[[ $(jq -r .status.state page.json) == Continue ]] || die "expected state Continue"
say "getting the other pages; the offset of each is status.continue of the previous one"
blocks=3
until [[ $(jq -r .status.state page.json) == Completed ]]; do
    page "$(jq .status.continue page.json)" 256
    blocks=$((blocks + $(jq '.status.changedBlocks | length' page.json)))
done
printf '    %d blocks\n' "$blocks"
((blocks == (64 + 2048 + 512) / 4)) || die "expected $(((64 + 2048 + 512) / 4)) blocks"
say "comparing the snapshot command with the driver's result"
flags=(--api aggregated --namespace "$namespace")
as backup show snapshot delta monday tuesday "${flags[@]}"
monday=$(handle_of monday) tuesday=$(handle_of tuesday)
same delta "$(as backup extents delta monday tuesday --page-size 100 "${flags[@]}")" "$(extents delta "$monday" "$tuesday")"
same allocated "$(as backup extents allocated monday "${flags[@]}")" "$(extents allocated "$monday")"
say "VolumeSnapshotDeltas are not stored and cannot be read"
print_command kubectl get volumesnapshotdeltas
rejected MethodNotAllowed kubectl get volumesnapshotdeltas
say "the server rejects a ServiceAccount that may create VolumeSnapshotDeltas but not read these snapshots"
rejected volumesnapshots as stranger show snapshot delta monday tuesday "${flags[@]}"
say "stopping the server: VolumeSnapshotDeltas become unavailable, other resources of the group remain available"
stop aggregated-api
wait_for "apiservice/$api_service" condition=Available=False
rejected ServiceUnavailable page 0 3
shell kubectl get driverdiscoveries
say "removing the APIService, so that namespaces can be deleted again"
shell kubectl delete apiservice "$api_service"
await discovery kubectl api-resources
shell kubectl api-resources --api-group=cbt.storage.k8s.io
remove_volume
