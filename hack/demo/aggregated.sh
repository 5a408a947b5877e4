# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the same with kubectl create, page by page, through the aggregated API server

server=csi-loopback-aggregated-api
servers=csi-loopback-aggregated
api_service=v1alpha1.cbt.storage.k8s.io

is_discovered() { [[ $(kubectl api-resources --api-group=cbt.storage.k8s.io -o name) == *volumesnapshotdeltas* ]]; }

# page OFFSET LIMIT: creates a VolumeSnapshotDelta, and writes the answer to page.json. Without --validate=ignore kubectl
# reads CustomResourceDefinitions, which not everybody may.
page() {
    cat >delta.yaml <<END
apiVersion: cbt.storage.k8s.io/v1alpha1
kind: VolumeSnapshotDelta
metadata: {name: changed}
spec: {baseVolumeSnapshotName: monday, targetVolumeSnapshotName: tuesday, mode: block, offset: $1, limit: $2}
END
    tell kubectl create --validate=ignore -f delta.yaml -o json "# offset: $1, limit: $2"
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
# The API server, which is no pod here, finds it by a Service that is a name.
quietly kubectl -n "$servers" patch service "$server" --type=merge \
    -p '{"spec": {"type": "ExternalName", "externalName": "localhost", "selector": null}}'
quietly kubectl patch apiservice "$api_service" --type=merge -p '{"spec": {"service": {"port": '"$port"'}}}'
await discovery is_discovered
make_stranger volumesnapshotdeltas.cbt.storage.k8s.io
shell kubectl get apiservice "$api_service"
wait_for "driverdiscovery/$driver_name" condition=CapabilityPresent
shell kubectl get driverdiscoveries
take_snapshots
say "a page of three blocks, for a ServiceAccount with the ClusterRole csi-loopback-snapshot-delta-user"
page 0 3
indent <delta.yaml
jq .status page.json | indent
[[ $(jq -r .status.state page.json) == Continue ]] || die "the state Continue was expected"
say "the other pages: each begins where status.continue of the one before says"
blocks=3
until [[ $(jq -r .status.state page.json) == Completed ]]; do
    page "$(jq .status.continue page.json)" 256
    blocks=$((blocks + $(jq '.status.changedBlocks | length' page.json)))
done
printf '    %d blocks\n' "$blocks"
((blocks == (64 + 2048 + 512) / 4)) || die "these are not the blocks that changed"
say "the same with the command, and the driver's own answer"
flags=(--api aggregated --namespace "$namespace")
as backup show snapshot delta monday tuesday "${flags[@]}"
monday=$(handle_of monday) tuesday=$(handle_of tuesday)
same delta "$(as backup extents delta monday tuesday --page-size 100 "${flags[@]}")" "$(extents delta "$monday" "$tuesday")"
same allocated "$(as backup extents allocated monday "${flags[@]}")" "$(extents allocated "$monday")"
say "nothing is stored: no one can get a VolumeSnapshotDelta"
tell kubectl get volumesnapshotdeltas
refused MethodNotAllowed kubectl get volumesnapshotdeltas
say "a ServiceAccount that may create VolumeSnapshotDeltas and may not read these snapshots is refused"
refused volumesnapshots as stranger show snapshot delta monday tuesday "${flags[@]}"
say "the server ends: the API is unavailable, and the rest of its group remains"
stop aggregated-api
wait_for "apiservice/$api_service" condition=Available=False
refused ServiceUnavailable page 0 3
shell kubectl get driverdiscoveries
say "removing the APIService, so that namespaces can be deleted again"
shell kubectl delete apiservice "$api_service"
await discovery kubectl api-resources
shell kubectl api-resources --api-group=cbt.storage.k8s.io
remove_volume
