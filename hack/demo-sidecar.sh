#!/usr/bin/env bash
# hack/demo-sidecar.sh: what a backup application does, on one machine with a real API server. Starts a
# cluster without nodes (hack/cluster.sh), a driver with csi-snapshotter and the sidecar beside it, writes to a
# volume, takes VolumeSnapshots, and asks through Kubernetes, as a ServiceAccount that may do no more than it
# has to, which blocks hold data and which changed; asks the same with the released lister; is refused where
# it has no right; and proves by bytes that the answer is true. Leaves nothing behind, also when it is
# interrupted.
#
# CSI_LOOPBACK_BIN      the binary to show; without it, the one of this tree is built
# CSI_LOOPBACK_SIDECAR  `released` shows the released sidecar in the place of ours
# Needs root, for loop devices and mounts. The first run builds the parts of Kubernetes, which takes minutes.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"
# shellcheck source=hack/cluster-stage.sh
source "$(dirname "$0")/cluster-stage.sh"

# What a token for the sidecar must be made for.
# shellcheck disable=SC2154 # cluster-stage.sh sets it
audience=snapshot-metadata.$driver_name
# Where the snapshots are.
# shellcheck disable=SC2034 # used by cluster-stage.sh
namespace=demo

# What the sidecar may do, and what a backup application may.
grant() {
    kubectl apply -f - >"$tmp/grant.log" <<END
{apiVersion: v1, kind: Namespace, metadata: {name: demo}}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: loopback}
driver: $driver_name
deletionPolicy: Delete
---
{apiVersion: v1, kind: Namespace, metadata: {name: backup}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: storage}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: sidecar, namespace: storage}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: backup, namespace: backup}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: stranger, namespace: backup}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: sidecar}
rules:
- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}
- {apiGroups: [authorization.k8s.io], resources: [subjectaccessreviews], verbs: [create]}
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshots, volumesnapshotcontents, volumesnapshotclasses]
  verbs: [get, list, watch]
- {apiGroups: [cbt.storage.k8s.io], resources: [snapshotmetadataservices], verbs: [get, list, watch]}
---
$(bind ClusterRoleBinding sidecar ClusterRole sidecar storage sidecar)
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: find-blocks}
rules:
- {apiGroups: [cbt.storage.k8s.io], resources: [snapshotmetadataservices], verbs: [get]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents], verbs: [get]}
---
$(bind ClusterRoleBinding find-blocks ClusterRole find-blocks backup backup)
---
# Its own token, and no one else's.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: own-token, namespace: backup}
rules:
- {apiGroups: [""], resources: [serviceaccounts/token], resourceNames: [backup], verbs: [create]}
---
$(bind RoleBinding own-token Role own-token backup backup backup)
---
# The namespace that is backed up.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: read-snapshots, namespace: demo}
rules:
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots], verbs: [get]}
---
$(bind RoleBinding read-snapshots Role read-snapshots backup backup demo)
END
}

bind() { # bind KIND NAME ROLE_KIND ROLE ACCOUNT_NAMESPACE ACCOUNT [NAMESPACE]
    cat <<END
apiVersion: rbac.authorization.k8s.io/v1
kind: $1
metadata: {name: $2${7:+, namespace: $7}}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: $3, name: $4}
subjects: [{kind: ServiceAccount, namespace: $5, name: $6}]
END
}

# Starts the sidecar with a certificate of the cluster's authority, and tells where it is.
start_sidecar() {
    local port http pki=$tmp/cluster/pki
    local command=("$driver" --mode sidecar)
    [[ ${CSI_LOOPBACK_SIDECAR:-} != released ]] || command=("$tmp/cluster/tools/csi-snapshot-metadata")
    port=$(free_port) http=$(free_port)
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 1 -subj /CN=sidecar \
        -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -keyout "$tmp/tls.key" -out "$tmp/tls.crt" \
        -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth \
        -addext subjectAltName=DNS:localhost >"$tmp/openssl.log" 2>&1
    kubectl apply -f - >/dev/null <<END
apiVersion: cbt.storage.k8s.io/v1beta1
kind: SnapshotMetadataService
metadata: {name: $driver_name}
spec: {address: "localhost:$port", audience: $audience, caCert: $(base64 -w0 <"$pki/ca.crt")}
END
    kubeconfig_of storage sidecar
    start sidecar "${command[@]}" --csi-address "$tmp/csi.sock" --port "$port" --http-endpoint ":$http" \
        --tls-cert "$tmp/tls.crt" --tls-key "$tmp/tls.key" --audience "$audience" \
        --kubeconfig "$tmp/sidecar.kubeconfig"
    until_so 60 "the sidecar" healthy "$port" "$http"
}

# as_extents FILTER: offset and length of each extent, a line each.
as_extents() { jq -r "$1 | \"\\(.[0]) \\(.[1])\""; }

# compare_with_lister ARGUMENT... -- LISTER_ARGUMENT...: whether both say the same.
compare_with_lister() {
    local ours=() theirs
    while [[ $1 != -- ]]; do
        ours+=("$1")
        shift
    done
    shift
    theirs=$("$tmp/cluster/tools/snapshot-metadata-lister" -o json "$@" |
        as_extents '.[].block_metadata[] | [.byte_offset // 0, .size_bytes]')
    [[ $("$driver" "${ours[@]}" --output json | as_extents '.extents[] | [.offset, .length]') == "$theirs" ]] ||
        die "the released lister says something else"
    say "both list the same $(wc -l <<<"$theirs") extents"
}

begin_demo "${storage_commands[@]}" setsid jq openssl

say "starting an API server, etcd and the snapshot-controller, in \$tmp ($tmp)"
start_cluster
grant

say "starting the driver, csi-snapshotter and the sidecar"
start_driver
start_snapshotter
start_sidecar
kubectl get snapshotmetadataservices | sed 's/^/    /'

say "a volume with a PersistentVolumeClaim, published as a block device"
make_volume

say "writing, and a VolumeSnapshot: monday"
write 0 8192
write 64 1024
write 512 4
take_snapshot monday

say "changing, and another: tuesday"
write 4 64
write 300 2048
blkdiscard --offset $((64 << 20)) --length $((512 << 10)) "$tmp/device"
printf '    %5d KiB at %d MiB discarded\n' 512 64
take_snapshot tuesday

kubeconfig_of backup backup
say "from here on as ServiceAccount backup/backup, which may read VolumeSnapshots in the namespace demo"
export KUBECONFIG=$tmp/backup.kubeconfig

say "a full backup reads what holds data on monday"
show snapshot allocated monday --namespace demo

say "an incremental one reads what changed since"
show snapshot delta monday tuesday --namespace demo

say "the same with the lister of external-snapshot-metadata"
tell snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n demo -s tuesday -p monday
run "$tmp/cluster/tools/snapshot-metadata-lister" -kubeconfig "$KUBECONFIG" -n demo -s tuesday -p monday
compare_with_lister snapshot allocated monday --namespace demo -- -kubeconfig "$KUBECONFIG" -n demo -s monday
compare_with_lister snapshot delta monday tuesday --namespace demo -- \
    -kubeconfig "$KUBECONFIG" -n demo -s tuesday -p monday

say "a ServiceAccount without that right is refused"
if show snapshot allocated monday --namespace demo --kubeconfig "$tmp/cluster/kubeconfig" \
    --service-account stranger --service-account-namespace backup; then
    die "the stranger was not refused"
fi

say "is the incremental answer true? Comparing every byte of both on the driver's side"
show snapshot verify "$(handle_of monday)" "$(handle_of tuesday)"

say "taking everything down"
unset KUBECONFIG
take_down run
end_demo
