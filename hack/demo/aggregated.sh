# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the same with kubectl create, page by page, through the aggregated API server

server=csi-loopback-aggregated-api
servers=csi-loopback-aggregated
api_service=v1alpha1.cbt.storage.k8s.io

# deploy/base with deploy/components/cbt-http, and deploy/aggregated-api.
apply_all() {
    local deploy
    mkdir "$tmp/overlay"
    deploy=$(realpath --relative-to="$tmp/overlay" "$repo/deploy")
    printf '%s\n' "resources: [$deploy/base]" "components: [$deploy/components/cbt-http]" \
        >"$tmp/overlay/kustomization.yaml"
    tell kubectl apply --server-side -k "$tmp/overlay" "# deploy/base with deploy/components/cbt-http"
    kubectl apply --server-side -k "$tmp/overlay" >>"$tmp/apply.log"
    apply aggregated-api
    kubectl create namespace "$namespace" >>"$tmp/apply.log"
}

# The API server, which is no pod here, finds it by a Service that is a name.
start_aggregated() {
    free_ports
    kubectl -n "$servers" patch service "$server" --type=merge \
        -p '{"spec": {"type": "ExternalName", "externalName": "localhost", "selector": null}}' >>"$tmp/apply.log"
    kubectl patch apiservice "$api_service" --type=merge -p '{"spec": {"service": {"port": '"$port"'}}}' >>"$tmp/apply.log"
    start_server "$servers" "deployment/$server" aggregated-api "--service-address=$server.$servers.svc:$port"
    await "the APIService" is_available True
    await "discovery" is_discovered
}

is_available() { # is_available STATUS
    kubectl wait --timeout=1s --for=condition=Available="$1" "apiservice/$api_service"
}

is_discovered() {
    [[ $(kubectl api-resources --api-group=cbt.storage.k8s.io -o name) == *volumesnapshotdeltas* ]]
}

is_whole() { [[ $(kubectl api-resources 2>&1 >/dev/null) != *'unable to retrieve'* ]]; }

delta() { # delta OFFSET LIMIT: writes a VolumeSnapshotDelta to delta.yaml
    cat >delta.yaml <<END
apiVersion: cbt.storage.k8s.io/v1alpha1
kind: VolumeSnapshotDelta
metadata: {name: changed, namespace: $namespace}
spec: {baseVolumeSnapshotName: monday, targetVolumeSnapshotName: tuesday, mode: block, offset: $1, limit: $2}
END
}

# create: writes the answer to page.json and sets state. kubectl looks for what it cannot patch among the
# CustomResourceDefinitions, which not everybody may list.
create() {
    tell kubectl create --validate=ignore -f delta.yaml -o json
    as backup kubectl create --validate=ignore -f delta.yaml -o json >page.json || return
    state=$(jq -r .status.state page.json)
}

# same_as_driver COMMAND SNAPSHOT...: compares what the command lists with the driver's own answer.
same_as_driver() {
    local name ours theirs handles=()
    for name in "${@:2}"; do
        handles+=("$(handle_of "$name")")
    done
    theirs=$("$driver" snapshot "$1" "${handles[@]}" --output json | jq -c '.extents[] | [.offset, .length]')
    ours=$(as backup "$driver" snapshot "$@" --api aggregated --page-size 100 --namespace "$namespace" \
        --output json | jq -c '.extents[] | [.offset, .length]')
    [[ $ours == "$theirs" ]] || die "the aggregated API says something else than the driver"
    printf '    %d extents, the same as the driver says\n' "$(wc -l <<<"$ours")"
}

begin curl
start_cluster
apply_all
say "starting the driver, csi-snapshotter, the sidecar with cbt-http and the aggregated API server"
driver_flags=(--enable-snapshot-deltas)
start_driver
start_snapshotter
cbt=$(free_port)
start_sidecar "--cbt-http-port=$cbt" "--cbt-http-service-address=localhost:$cbt"
start_aggregated
shell kubectl get apiservice "$api_service"
await "the conditions of the DriverDiscovery" \
    kubectl wait --timeout=1s --for=condition=CapabilityPresent "driverdiscovery/$driver_name"
shell kubectl get driverdiscoveries
take_snapshots
make_account stranger volumesnapshotdeltas.cbt.storage.k8s.io
make_account backup volumesnapshotdeltas.cbt.storage.k8s.io
kubectl -n "$namespace" create rolebinding backup-user --clusterrole=csi-loopback-snapshot-delta-user \
    --serviceaccount="$namespace:backup" >>"$tmp/apply.log"

say "a page of three blocks, for a ServiceAccount with the ClusterRole csi-loopback-snapshot-delta-user"
delta 0 3
shell cat delta.yaml
create
jq .status page.json | indent
[[ $state == Continue ]] || die "the state Continue was expected"

say "the other pages: each begins where status.continue of the one before says"
blocks=3
while [[ $state == Continue ]]; do
    delta "$(jq .status.continue page.json)" 256
    create
    blocks=$((blocks + $(jq '.status.changedBlocks | length' page.json)))
done
printf '    %d blocks, %s\n' "$blocks" "$state"
[[ $state == Completed ]] || die "the state Completed was expected"
((blocks == changed / 4)) || die "$((changed / 4)) blocks were expected"

say "the same with the command, and the driver's own answer"
as backup show snapshot delta monday tuesday --api aggregated --namespace "$namespace"
same_as_driver delta monday tuesday
same_as_driver allocated monday

say "nothing is stored: no one can get a VolumeSnapshotDelta"
tell kubectl -n "$namespace" get volumesnapshotdeltas
refused MethodNotAllowed kubectl -n "$namespace" get volumesnapshotdeltas
say "a ServiceAccount that may create VolumeSnapshotDeltas and may not read these snapshots is refused"
refused volumesnapshots as stranger show snapshot delta monday tuesday --api aggregated --namespace "$namespace"

say "the server ends: the API is unavailable, and the other versions of its group remain"
stop_started aggregated-api
await "the APIService is not available" is_available False
refused "" create
shell kubectl get driverdiscoveries
say "removing the APIService, so that namespaces can be deleted again"
shell kubectl delete apiservice "$api_service"
await "discovery is whole" is_whole
shell kubectl api-resources --api-group=cbt.storage.k8s.io
remove_volume
