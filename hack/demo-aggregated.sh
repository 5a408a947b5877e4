#!/usr/bin/env bash
# hack/demo-aggregated.sh: VolumeSnapshotDelta, on one machine with a real API server. Starts a cluster without nodes
# (hack/cluster.sh), a driver with csi-snapshotter and the sidecar with cbt-http beside it, and the aggregated API server, each as the
# ServiceAccount and with the rights that deploy/ gives it; writes to a volume and takes VolumeSnapshots; asks with kubectl, as a
# ServiceAccount that may do no more than it has to, page by page which blocks changed; shows that the command lists the
# same as the driver says itself; is refused what nobody can have, and where it has no right; stops the server and shows
# what that stops, and how the API is taken away. Leaves nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN      the binary to show; without it, the one of this tree is built
# Needs root, for loop devices and mounts. The first run builds the parts of Kubernetes, which takes minutes.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"
# shellcheck source=hack/cluster-stage.sh
source "$(dirname "$0")/cluster-stage.sh"

# Where the snapshots are, and what is installed for VolumeSnapshotDelta.
namespace=backup-demo
server=csi-loopback-aggregated-api
servers=csi-loopback-aggregated
api_service=v1alpha1.cbt.storage.k8s.io

# What deploy/ has, but for pods, which nobody starts here: they run beside this script.
install() {
    local to_deploy
    mkdir "$tmp/overlay"
    to_deploy=$(realpath --relative-to="$tmp/overlay" "$repo/deploy")
    cat >"$tmp/overlay/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [$to_deploy/base]
components: [$to_deploy/components/cbt-http]
END
    tell kubectl apply --server-side -k overlay "# deploy/base with deploy/components/cbt-http"
    kubectl apply --server-side -k "$tmp/overlay" >>"$tmp/install.log"
    tell kubectl apply --server-side -k deploy/aggregated-api
    kubectl apply --server-side -k "$repo/deploy/aggregated-api" >>"$tmp/install.log"
    # Whose snapshots are of a class of its own here, who may compare them, and somebody who may not read them.
    kubectl apply -f - >>"$tmp/install.log" <<END
{apiVersion: v1, kind: Namespace, metadata: {name: $namespace}}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: loopback}
driver: $driver_name
deletionPolicy: Delete
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: backup, namespace: $namespace}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: backup, namespace: $namespace}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: csi-loopback-snapshot-delta-user}
subjects: [{kind: ServiceAccount, namespace: $namespace, name: backup}]
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: stranger, namespace: $namespace}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: stranger, namespace: $namespace}
rules:
- {apiGroups: [cbt.storage.k8s.io], resources: [volumesnapshotdeltas], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: stranger, namespace: $namespace}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: stranger}
subjects: [{kind: ServiceAccount, namespace: $namespace, name: stranger}]
END
}

# With the flags of deploy/base and deploy/components/cbt-http. The addresses are this machine's.
start_sidecar() {
    local port cbt http
    port=$(free_port) cbt=$(free_port) http=$(free_port)
    kubeconfig_of csi-loopback csi-loopback-metadata
    start sidecar "$driver" --mode sidecar --csi-address "$tmp/csi.sock" --port "$port" --http-endpoint ":$http" \
        --audience "snapshot-metadata.$driver_name" --manage-service --service-address "localhost:$port" \
        --self-signed --self-signed-secret csi-loopback-metadata-tls --namespace csi-loopback \
        --cbt-http --cbt-http-port "$cbt" --cbt-http-service-address "localhost:$cbt" \
        --cbt-http-lease csi-loopback-cbt-http --cbt-http-advertise-address "127.0.0.1:$cbt" \
        --kubeconfig "$tmp/csi-loopback-metadata.kubeconfig"
    until_so 60 "the sidecar" healthy "$port" "$http"
    until_so 60 "the DriverDiscovery" kubectl get driverdiscovery "$driver_name"
}

# With the flags of deploy/aggregated-api. The API server finds it, which is no pod here, by a Service that is a name.
start_server() {
    local port http
    port=$(free_port) http=$(free_port)
    kubectl -n "$servers" patch service "$server" --type=merge \
        -p '{"spec": {"type": "ExternalName", "externalName": "localhost", "selector": null}}' \
        >>"$tmp/install.log"
    kubectl patch apiservice "$api_service" --type=merge -p '{"spec": {"service": {"port": '"$port"'}}}' \
        >>"$tmp/install.log"
    kubeconfig_of "$servers" "$server"
    start aggregated-api "$driver" --mode aggregated-api --port "$port" --http-endpoint ":$http" \
        --self-signed --self-signed-secret csi-loopback-aggregated-api-ca \
        --service-address "$server.$servers.svc:$port" --api-service "$api_service" \
        --lease "$server" --service-account "$server" --namespace "$servers" --identity demo \
        --kubeconfig "$tmp/$server.kubeconfig"
    server_pid=$started
    until_so 60 "the aggregated API server" healthy "$port" "$http"
    # It publishes whom to trust, and the API server looks at it.
    until_so 60 "the APIService" is_available True
    until_so 60 "discovery" is_discovered
}

# A moment behind Available; and what kubectl remembers of before is renewed.
is_discovered() {
    [[ $(kubectl api-resources --api-group=cbt.storage.k8s.io -o name) == *volumesnapshotdeltas* ]]
}

is_available() { # is_available STATUS
    kubectl wait --timeout=1s --for=condition=Available="$1" "apiservice/$api_service"
}

# as_user ARGUMENT...: kubectl as the backup application.
as_user() {
    "$tmp/cluster/tools/kubectl" --kubeconfig "$tmp/backup.kubeconfig" --cache-dir "$tmp/cache-backup" "$@"
}

delta() { # delta OFFSET LIMIT: a VolumeSnapshotDelta
    cat <<END
apiVersion: cbt.storage.k8s.io/v1alpha1
kind: VolumeSnapshotDelta
metadata: {name: test-delta, namespace: $namespace}
spec: {baseVolumeSnapshotName: monday, targetVolumeSnapshotName: tuesday, mode: block, offset: $1, limit: $2}
END
}

# same_as_the_driver ARGUMENT...: that the command lists the same as the driver's own answer, which is in $tmp/own.json.
same_as_the_driver() {
    "$driver" snapshot "$@" --output json >"$tmp/aggregated.json"
    cmp <(jq -c '.extents[] | [.offset, .length]' "$tmp/own.json") \
        <(jq -c '.extents[] | [.offset, .length]' "$tmp/aggregated.json") ||
        die "the aggregated API says otherwise than the driver"
    printf '    %d extents, the same as the driver says\n' "$(jq '.extents | length' "$tmp/own.json")"
}

# refused WORDS COMMAND...: shows a command that has to fail with these words.
refused() {
    local words=$1 told
    shift
    if told=$("$@" 2>&1); then
        die "not refused: $told"
    fi
    printf '%s\n' "$told" | sed 's/^/    /'
    [[ $told == *"$words"* ]] || die "'$words' was expected"
}

begin_demo "${storage_commands[@]}" setsid jq

say "starting an API server, etcd and the snapshot-controller, in \$tmp ($tmp)"
start_cluster
install

say "starting the driver, csi-snapshotter, the sidecar with cbt-http and the aggregated API server"
driver_flags=(--enable-snapshot-deltas)
start_driver
start_snapshotter
start_sidecar
start_server
kubeconfig_of "$namespace" backup
kubeconfig_of "$namespace" stranger
tell kubectl get apiservice "$api_service"
kubectl get apiservice "$api_service" | sed 's/^/    /'
until_so 60 "the conditions of the DriverDiscovery" \
    kubectl wait --timeout=1s --for=condition=CapabilityPresent "driverdiscovery/$driver_name"
tell kubectl get driverdiscoveries
kubectl get driverdiscoveries | sed 's/^/    /'
# The API server fetches descriptions now and then.
until_so 150 "the description" kubectl explain vsd.spec.offset
tell kubectl explain vsd.spec.offset
kubectl explain vsd.spec.offset | sed 's/^/    /'

say "a volume with a PersistentVolumeClaim, published as a block device"
make_volume

say "writing, and a VolumeSnapshot: monday"
write 0 8192
write 64 1024
take_snapshot monday

say "changing, and another: tuesday"
write 4 64
write 300 2048
take_snapshot tuesday

say "from here on as ServiceAccount $namespace/backup: a page of three blocks"
delta 0 3 | sed 's/^/    /'
# kubectl looks among the CustomResourceDefinitions for what cannot be patched, and not everybody may list those.
tell kubectl create --validate=ignore -f - -o json
delta 0 3 | as_user create --validate=ignore -f - -o json >"$tmp/page.json"
jq .status "$tmp/page.json" | sed 's/^/    /'
[[ $(jq -r .status.state "$tmp/page.json") == Continue ]] || die "the state Continue was expected"

say "the next one begins where status.continue says"
delta "$(jq .status.continue "$tmp/page.json")" 3 | as_user create --validate=ignore -f - -o json | jq -c .status | sed 's/^/    /'

say "all of them: kubectl asks until nothing follows"
offset=0 pages=0 blocks=0
while :; do
    delta "$offset" 256 | as_user create --validate=ignore -f - -o json >"$tmp/page.json"
    pages=$((pages + 1)) blocks=$((blocks + $(jq '.status.changedBlocks | length' "$tmp/page.json")))
    [[ $(jq -r .status.state "$tmp/page.json") == Continue ]] || break
    offset=$(jq .status.continue "$tmp/page.json")
done
[[ $(jq -r .status.state "$tmp/page.json") == Completed ]] || die "the state Completed was expected"
printf '    %d blocks on %d pages\n' "$blocks" "$pages"
((blocks == (64 + 2048) / 4)) || die "$(((64 + 2048) / 4)) blocks were expected"

say "the same with the command, and as the driver says it itself"
show snapshot delta monday tuesday --api aggregated --namespace "$namespace" --kubeconfig "$tmp/backup.kubeconfig"
monday=$(handle_of monday) tuesday=$(handle_of tuesday)
"$driver" snapshot delta "$monday" "$tuesday" --output json >"$tmp/own.json"
same_as_the_driver delta monday tuesday --api aggregated --page-size 100 --namespace "$namespace" \
    --kubeconfig "$tmp/backup.kubeconfig"
"$driver" snapshot allocated "$monday" --output json >"$tmp/own.json"
same_as_the_driver allocated monday --api aggregated --namespace "$namespace" --kubeconfig "$tmp/backup.kubeconfig"

say "nothing of it is kept: there is nothing to get, for anybody"
tell kubectl -n "$namespace" get volumesnapshotdeltas
refused MethodNotAllowed kubectl -n "$namespace" get volumesnapshotdeltas

say "a ServiceAccount that may create VolumeSnapshotDeltas and may not read these snapshots is refused"
tell csi-loopback snapshot delta monday tuesday --api aggregated --namespace "$namespace"
refused volumesnapshots "$driver" snapshot delta monday tuesday --api aggregated --namespace "$namespace" \
    --kubeconfig "$tmp/stranger.kubeconfig"

say "the server ends: the API is away, and what else the group has is not"
stop "$server_pid" 30
unset "name_of[$server_pid]"
left=()
for pid in "${running[@]}"; do
    [[ $pid == "$server_pid" ]] || left+=("$pid")
done
running=("${left[@]}")
until_so 60 "the APIService is not available" is_available False
refused "" as_user create --validate=ignore -f <(delta 0 3) -o json
tell kubectl get driverdiscoveries
kubectl get driverdiscoveries | sed 's/^/    /'

say "taking the API away, so that namespaces can end again"
tell kubectl delete apiservice "$api_service"
kubectl delete apiservice "$api_service" | sed 's/^/    /'
discovery_is_whole() { [[ $(kubectl api-resources 2>&1 >/dev/null) != *'unable to retrieve'* ]]; }
until_so 60 "discovery is whole" discovery_is_whole
kubectl api-resources --api-group=cbt.storage.k8s.io | sed 's/^/    /'

say "taking everything down"
take_down run
end_demo
