#!/usr/bin/env bash
# hack/kind-demo.sh [--delete]: runs the driver and its components in a kind cluster on this
# machine. It loads the image, installs everything with a pool of 2 GiB, writes to a volume, takes a
# snapshot, changes the volume, takes another snapshot, and lists the allocated blocks of the first
# snapshot and the changed blocks of the second one like a backup application: with ServiceAccount
# tokens, and in snapshot sessions.
#
# It continues where an earlier run ended, and keeps the cluster. --delete deletes it with its loop
# devices, which are this machine's and remain after `kind delete cluster` alone. It needs docker,
# kind and kubectl, and does not change your kubectl configuration.
#
# KIND_RELEASE   directory of a release (hack/release.sh): its image, and its manifests of
#                snapshot-controller, which otherwise come from a Go module and need go
# KIND_LOOPBACK  image of csi-loopback that docker has or pulls (csi-loopback:0.1.0)
# KIND_ARCHIVE   archive with that image (hack/image.sh), in place of docker's
# KIND_CLUSTER   name of the cluster (csi-loopback)
# KIND_IMAGE     node image of kind (kind's default); hack/kind-node.sh builds one
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

cluster=${KIND_CLUSTER:-csi-loopback}
export KUBECONFIG=$cache/kind/$cluster.kubeconfig
release=${KIND_RELEASE:-}
[[ -z $release ]] || release=$(realpath "$release")
# Seconds to wait for downloads and starts.
patience=300

say() { printf '==> %s\n' "$*"; }

# try NEXT COMMAND...: runs the command. On failure, prints NEXT and ends the script.
try() {
    local next=$1
    shift
    "$@" && return
    printf '\n%s: failed: %s\nnext: %s\n' "${0##*/}" "$*" "$next" >&2
    exit 1
}

exists() { kind get clusters 2>/dev/null | grep -qx "$cluster"; }

# --- Deletion -------------------------------------------------------------------------------------

delete() {
    exists || return 0
    # Loop devices belong to the machine and must be detached before the node is deleted: delete
    # users of volumes first, then volumes, then the driver.
    try "check: kubectl get pods,pvc,volumesnapshots -A; volumes are deleted only while the driver runs" \
        kubectl delete --ignore-not-found --timeout="${patience}s" namespace backup-app backup-app-session
    # Sessions can only be deleted while the session manager runs.
    try "check: kubectl -n csi-loopback-sessions get pods; csi-loopback --mode session-manager --clean-up" delete_sessions
    try "check: kubectl -n backup-demo get pods,pvc,volumesnapshots" \
        kubectl delete --ignore-not-found --timeout="${patience}s" namespace backup-demo
    try "check: kubectl -n csi-loopback-sessions get pods" \
        kubectl delete --ignore-not-found --timeout="${patience}s" -k deploy/session-manager
    try "check: kubectl get persistentvolumes,volumesnapshotcontents" await_volume_deletion
    try "check: kubectl -n csi-loopback get pods" \
        kubectl delete --ignore-not-found --timeout="${patience}s" namespace csi-loopback
    try "kind delete cluster --name $cluster" kind delete cluster --name "$cluster"
    rm -f "$KUBECONFIG"
}

delete_sessions() {
    # An interrupted run may not have installed the CRD.
    ! kubectl get crd snapshotsessionrequests.cbt.storage.k8s.io >/dev/null 2>&1 ||
        kubectl delete --timeout="${patience}s" snapshotsessionrequests --all --all-namespaces
}

await_volume_deletion() {
    local deadline=$((SECONDS + patience)) remaining
    while remaining=$(kubectl get persistentvolumes,volumesnapshotcontents --no-headers 2>/dev/null) && [[ -n $remaining ]]; do
        if ((SECONDS >= deadline)); then
            echo "$remaining" >&2
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

load_image() {
    local archive=${KIND_ARCHIVE:-} image
    [[ -z $release ]] || archive=$(compgen -G "$release/images/csi-loopback-*-$(uname -m).tar")
    if [[ -n $archive ]]; then
        kind load image-archive --name "$cluster" "$archive"
        return
    fi
    image=$(kubectl kustomize deploy/overlays/kind | sed -n 's/^ *\(- \)\?image: *\(csi-loopback:\)/\2/p' | sort -u)
    local found=${KIND_LOOPBACK:-$image}
    docker image inspect --format '{{.Id}}' "$found" 2>/dev/null || docker pull "$found" || return 1
    [[ $found == "$image" ]] || docker tag "$found" "$image" || return 1
    kind load docker-image --name "$cluster" "$image"
}

install_controller() {
    if [[ -n $release ]]; then
        kubectl apply --server-side -f "$release/manifests/snapshot-controller.yaml"
    else
        snapshot_controller | kubectl apply --server-side -f -
    fi
}

install_definitions() {
    local source files=(deploy/crds{,-upstream}/*.yaml)
    # With VolumeGroupSnapshots: csi-snapshotter waits for their definitions.
    if [[ -n $release ]]; then
        files+=("$release/manifests/snapshot-crds.yaml")
    else
        source=$(go_module kubernetes github.com/kubernetes-csi/external-snapshotter/client/v8) || return 1
        files+=("$source"/config/crd/*.storage.k8s.io_*.yaml)
    fi
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

list() { # list NAMESPACE POD: waits for a pod of a backup application and prints its output
    kubectl -n "$1" wait --for=jsonpath='{.status.phase}'=Succeeded --timeout="${patience}s" "pod/$2" &&
        kubectl -n "$1" logs "$2"
}

# --------------------------------------------------------------------------------------------------

for command in docker kind kubectl; do
    command -v "$command" >/dev/null || die "$command is missing; install it and run this script again"
done
[[ -n $release ]] || command -v go >/dev/null || die "go is missing; install it, or set KIND_RELEASE to the directory of a release"
try "start docker, or add your user to the docker group" docker info --format '{{.ServerVersion}}'

case ${1:-} in
    '') ;;
    --delete)
        delete
        say "deleted the cluster $cluster"
        exit
        ;;
    *) die "usage: hack/kind-demo.sh [--delete]" ;;
esac

again="then run this script again, or delete everything with --delete"

say "creating the cluster $cluster with one node"
try "check: docker ps, docker logs $cluster-control-plane; $again" make_cluster
say "loading the image into the node"
try "docker load --input ARCHIVE, or docker build --file deploy/Dockerfile --tag csi-loopback:0.1.0 .; $again" load_image
say "installing CustomResourceDefinitions and the snapshot-controller"
try "check: kubectl get crd; $again" install_definitions
try "check: kubectl -n kube-system get pods; $again" install_controller
try "check: kubectl -n kube-system describe deployment snapshot-controller; $again" \
    kubectl -n kube-system rollout status --timeout="${patience}s" deployment/snapshot-controller
say "installing the driver, its controllers and the sidecar"
try "check: kubectl -n csi-loopback describe pods; kubectl -n csi-loopback logs csi-loopback-0 driver; $again" \
    install_driver
say "installing the session manager"
try "check: kubectl -n csi-loopback-sessions describe pods; kubectl -n csi-loopback-sessions logs deployment/csi-loopback-session-manager; $again" \
    install_session_manager
say "creating a volume, and a pod that uses it"
try "check: kubectl -n backup-demo describe pvc,pods; kubectl -n csi-loopback logs csi-loopback-controller-0 csi-provisioner; $again" \
    make_volume
say "writing 64 MiB"
try "check: kubectl -n backup-demo describe pod writer; $again" \
    write 'head -c 67108864 /dev/urandom >/data/file; sync -f /data'
say "taking the snapshot first"
check="check: kubectl -n backup-demo describe volumesnapshots; kubectl -n csi-loopback logs csi-loopback-controller-0 csi-snapshotter; $again"
try "$check" snapshot first
say "overwriting 1 MiB in the middle"
try "check: kubectl -n backup-demo describe pod writer; $again" \
    write 'dd if=/dev/urandom of=/data/file bs=1M count=1 seek=32 conv=notrunc; sync -f /data'
say "taking the snapshot second"
try "$check" snapshot second
say "listing the services for backup applications"
try "check: kubectl -n csi-loopback logs csi-loopback-0 metadata; $again" \
    kubectl get snapshotmetadataservices,snapshotserviceconfigurations
for application in backup-app backup-app-session; do
    # Pods of an earlier run have that run's output.
    kubectl -n "$application" delete --ignore-not-found pod backup-full backup-incremental
    try "see the error above; $again" kubectl apply --server-side -k "deploy/examples/$application"
    check="check: kubectl -n $application logs POD; kubectl -n csi-loopback logs csi-loopback-0 metadata; $again"
    say "$application: full backup, the allocated blocks of the first snapshot"
    try "$check" list "$application" backup-full
    say "$application: incremental backup, the changed blocks of the second snapshot"
    try "$check" list "$application" backup-incremental
done
say "done. To use the cluster: export KUBECONFIG=$KUBECONFIG. To delete it: $0 --delete"
