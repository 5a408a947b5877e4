#!/usr/bin/env bash
# hack/kind-demo.sh [--delete]: the driver and its sidecar in a cluster of kind on this machine: builds the image,
# installs everything, writes to a volume, snapshots it, changes it, snapshots it again, and lists what the
# first snapshot holds and what changed to the second one, as a backup application does: with tokens of its own, and in snapshot sessions.
#
# It goes on where an earlier run ended, and leaves the cluster for a look; --delete takes it away. It needs
# docker, kind, kubectl and go, and changes nothing of the kubectl configuration that is there.
#
# CSI_IMAGES     registry and path where the released images of kubernetes-csi are (csi-provisioner,
#                csi-snapshotter, csi-resizer, csi-node-driver-registrar, livenessprobe, snapshot-controller).
#                Not needed for those that docker has under their plain names.
# KIND_CLUSTER   name of the cluster (csi-loopback)
# KIND_IMAGE     image of kind's node (kind's own choice)
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

cluster=${KIND_CLUSTER:-csi-loopback}
export KUBECONFIG=$cache/kind/$cluster.kubeconfig
# Seconds for what may have to be fetched and started.
patience=300

say() { printf '==> %s\n' "$*"; }

# try NEXT COMMAND...: runs it; where it fails, tells what to do next and ends.
try() {
    local next=$1
    shift
    "$@" && return
    printf '\n%s: failed: %s\nnext: %s\n' "${0##*/}" "$*" "$next" >&2
    exit 1
}

exists() { kind get clusters 2>/dev/null | grep -qx "$cluster"; }

# module MODULE: the directory of a Go module, at the version that the tests use.
module() {
    (cd hack/tools/kubernetes && go mod download "$1" >&2 && go list -m -f '{{.Dir}}' "$1")
}

# --- Taking it away -------------------------------------------------------------------------------

delete() {
    exists || return 0
    # Loop devices belong to the machine: they have to be let go before the node goes. First what uses
    # volumes, then the volumes, then the driver.
    try "look at: kubectl get pods,pvc,volumesnapshots -A; the driver has to run for volumes to go" \
        kubectl delete --ignore-not-found --timeout="${patience}s" namespace backup-app backup-app-session
    # Sessions end while their manager runs.
    try "look at: kubectl -n csi-loopback-sessions get pods; csi-loopback --mode session-manager --clean-up" sessions_are_gone
    try "look at: kubectl -n backup-demo get pods,pvc,volumesnapshots" \
        kubectl delete --ignore-not-found --timeout="${patience}s" namespace backup-demo
    try "look at: kubectl -n csi-loopback-sessions get pods" \
        kubectl delete --ignore-not-found --timeout="${patience}s" -k deploy/session-manager
    try "look at: kubectl get persistentvolumes,volumesnapshotcontents" volumes_are_gone
    try "look at: kubectl -n csi-loopback get pods" \
        kubectl delete --ignore-not-found --timeout="${patience}s" namespace csi-loopback
    try "kind delete cluster --name $cluster" kind delete cluster --name "$cluster"
    rm -f "$KUBECONFIG"
}

sessions_are_gone() {
    # A run that ended early has not installed them.
    ! kubectl get crd snapshotsessionrequests.cbt.storage.k8s.io >/dev/null 2>&1 ||
        kubectl delete --timeout="${patience}s" snapshotsessionrequests --all --all-namespaces
}

volumes_are_gone() {
    local deadline=$((SECONDS + patience)) left
    while left=$(kubectl get persistentvolumes,volumesnapshotcontents --no-headers 2>/dev/null) && [[ -n $left ]]; do
        if ((SECONDS >= deadline)); then
            echo "$left" >&2
            return 1
        fi
        sleep 2
    done
}

# --- The steps ------------------------------------------------------------------------------------

make_cluster() {
    mkdir -p "$(dirname "$KUBECONFIG")"
    if exists; then
        kind get kubeconfig --name "$cluster" >"$KUBECONFIG"
    else
        kind create cluster --name "$cluster" --config deploy/overlays/kind/cluster.yaml \
            --wait "${patience}s" ${KIND_IMAGE:+--image "$KIND_IMAGE"}
    fi
}

# load IMAGE: into the node, under its plain name.
load() {
    local image=$1
    if ! docker image inspect "$image" >/dev/null 2>&1; then
        [[ -n ${CSI_IMAGES:-} ]] || die "docker has no image $image, and CSI_IMAGES does not say where it is"
        docker pull "$CSI_IMAGES/$image" && docker tag "$CSI_IMAGES/$image" "$image" || return 1
    fi
    kind load docker-image --name "$cluster" "$image"
}

images() { kubectl kustomize "$1" | sed -n 's/^ *\(- \)\?image: *//p' | sort -u; }

build_image() {
    local image
    image=$(images deploy/overlays/kind | grep '^csi-loopback:')
    docker build --file deploy/Dockerfile --tag "$image" .
}

load_images() {
    local image
    while read -r image; do
        load "$image" || return 1
    done < <({ images deploy/overlays/kind && images "$controller"; } | sort -u)
}

# The snapshot-controller as it is released, under the image's plain name.
prepare_controller() {
    local source
    source=$(module github.com/kubernetes-csi/external-snapshotter/v8) || return 1
    cp -r "$source/deploy/kubernetes/snapshot-controller/." "$controller"
    chmod -R u+w "$controller"
    sed -i 's|image: .*/\(snapshot-controller:\)|image: \1|' "$controller"/*.yaml
}

install_definitions() {
    local source
    source=$(module github.com/kubernetes-csi/external-snapshotter/client/v8) || return 1
    local files=("$source"/config/crd/snapshot.storage.k8s.io_*.yaml deploy/crds/*.yaml)
    kubectl apply --server-side "${files[@]/#/--filename=}" &&
        kubectl wait --for=condition=Established --timeout="${patience}s" "${files[@]/#/--filename=}"
}

install_driver() {
    kubectl apply --server-side -k deploy/overlays/kind &&
        kubectl -n csi-loopback rollout status --timeout="${patience}s" statefulset/csi-loopback &&
        kubectl -n csi-loopback rollout status --timeout="${patience}s" statefulset/csi-loopback-controller
}

install_session_manager() {
    kubectl apply --server-side -k deploy/session-manager &&
        kubectl -n csi-loopback-sessions rollout status --timeout="${patience}s" deployment/csi-loopback-session-manager
}

make_volume() {
    kubectl apply --server-side -k deploy/examples/volume &&
        kubectl -n backup-demo wait --for=condition=Ready --timeout="${patience}s" pod/writer
}

write() { kubectl -n backup-demo exec writer -- sh -ec "$1"; }

snapshot() { # snapshot NAME
    kubectl apply --server-side -f - <<END || return 1
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata:
  name: $1
  namespace: backup-demo
spec:
  volumeSnapshotClassName: csi-loopback
  source:
    persistentVolumeClaimName: data
END
    kubectl -n backup-demo wait --for=jsonpath='{.status.readyToUse}'=true --timeout="${patience}s" \
        "volumesnapshot/$1"
}

list() { # list NAMESPACE POD: what a backup application's pod has listed
    kubectl -n "$1" wait --for=jsonpath='{.status.phase}'=Succeeded --timeout="${patience}s" "pod/$2" &&
        kubectl -n "$1" logs "$2"
}

# --------------------------------------------------------------------------------------------------

for command in docker kind kubectl go; do
    command -v "$command" >/dev/null || die "needs $command; next: install it, then run this again"
done
try "start docker, or add yourself to its group" docker info --format '{{.ServerVersion}}'

case ${1:-} in
    '') ;;
    --delete)
        delete
        say "the cluster $cluster is gone"
        exit
        ;;
    *) die "usage: hack/kind-demo.sh [--delete]" ;;
esac

controller=$(mktemp -d)
trap 'rm -rf "$controller"' EXIT
again="then run this again; --delete takes everything away"

say "a cluster of one node: $cluster"
try "look at: docker ps, docker logs $cluster-control-plane; $again" make_cluster
say "building the image"
try "see what the build says above; $again" build_image
say "loading images into the node"
try "go mod download in hack/tools/kubernetes; $again" prepare_controller
try "set CSI_IMAGES to where the released images are; $again" load_images
say "definitions of VolumeSnapshots and of this project's objects, snapshot-controller"
try "look at: kubectl get crd; $again" install_definitions
try "look at: kubectl -n kube-system get pods; $again" kubectl apply --server-side -k "$controller"
try "look at: kubectl -n kube-system describe deployment snapshot-controller; $again" \
    kubectl -n kube-system rollout status --timeout="${patience}s" deployment/snapshot-controller
say "the driver, its controllers and the sidecar"
try "look at: kubectl -n csi-loopback describe pods; kubectl -n csi-loopback logs csi-loopback-0 driver; $again" \
    install_driver
say "the session manager"
try "look at: kubectl -n csi-loopback-sessions describe pods; kubectl -n csi-loopback-sessions logs deployment/csi-loopback-session-manager; $again" \
    install_session_manager
say "a volume, and a pod that uses it"
try "look at: kubectl -n backup-demo describe pvc,pods; kubectl -n csi-loopback logs csi-loopback-controller-0 csi-provisioner; $again" \
    make_volume
say "64 MiB are written"
try "look at: kubectl -n backup-demo describe pod writer; $again" \
    write 'head -c 67108864 /dev/urandom >/data/file; sync -f /data'
say "the snapshot first"
look="look at: kubectl -n backup-demo describe volumesnapshots; kubectl -n csi-loopback logs csi-loopback-controller-0 csi-snapshotter; $again"
try "$look" snapshot first
say "1 MiB in the middle is written anew"
try "look at: kubectl -n backup-demo describe pod writer; $again" \
    write 'dd if=/dev/urandom of=/data/file bs=1M count=1 seek=32 conv=notrunc; sync -f /data'
say "the snapshot second"
try "$look" snapshot second
say "where backup applications ask"
try "look at: kubectl -n csi-loopback logs csi-loopback-0 metadata; $again" \
    kubectl get snapshotmetadataservices,snapshotserviceconfigurations
for application in backup-app backup-app-session; do
    # Pods of an earlier run would only tell what they told then.
    kubectl -n "$application" delete --ignore-not-found pod backup-full backup-incremental
    try "see above; $again" kubectl apply --server-side -k "deploy/examples/$application"
    look="look at: kubectl -n $application logs POD; kubectl -n csi-loopback logs csi-loopback-0 metadata; $again"
    say "$application, a full backup: what the first snapshot holds"
    try "$look" list "$application" backup-full
    say "$application, an incremental one: what changed to the second"
    try "$look" list "$application" backup-incremental
done
say "done. For a look: export KUBECONFIG=$KUBECONFIG. To take it away: $0 --delete"
