# shellcheck shell=bash disable=SC2154
# Scene: the same through the sidecar and a Kubernetes API server, for a backup application (needs Go)

lister() { # lister FLAG...: prints the extents of the released lister in the format of `extents`
    snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n "$namespace" -o json "$@" |
        jq -c '.[].block_metadata[] | [.byte_offset // 0, .size_bytes]'
}

begin
start_cluster
apply base examples/backup-app
# The right to request a token: pods of the example get theirs from a projected volume.
shell kubectl -n backup-app create role token --verb=create --resource=serviceaccounts/token --resource-name=backup-app
shell kubectl -n backup-app create rolebinding token --role=token --serviceaccount=backup-app:backup-app
kubeconfig_of backup-app backup-app
quietly kubectl create serviceaccount stranger
say "starting the driver, csi-snapshotter and the sidecar"
start_storage
shell kubectl get snapshotmetadataservices
take_snapshots
monday=$(handle_of monday) tuesday=$(handle_of tuesday)
say "switching to the ServiceAccount backup-app, which may read VolumeSnapshots in the namespace $namespace"
act_as backup-app
say "full backup: listing the allocated blocks of monday"
show snapshot allocated monday --namespace "$namespace"
say "incremental backup: listing the blocks that changed from monday to tuesday"
show snapshot delta monday tuesday --namespace "$namespace"
say "listing the same with the lister of external-snapshot-metadata"
shell snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n "$namespace" -s tuesday -p monday
same allocated "$(extents allocated monday --namespace "$namespace")" "$(lister -s monday)"
same delta "$(extents delta monday tuesday --namespace "$namespace")" "$(lister -s tuesday -p monday)"
say "the sidecar rejects a ServiceAccount without that right"
rejected PERMISSION_DENIED as administrator show snapshot allocated monday --namespace "$namespace" --service-account stranger
say "verifying the delta through the driver: comparing every byte of both snapshots"
show snapshot verify "$monday" "$tuesday"
remove_volume
