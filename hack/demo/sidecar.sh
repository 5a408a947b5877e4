# shellcheck shell=bash disable=SC2154
# Scene: the same as a backup application sees it, through a real Kubernetes API server (needs Go)

lister() { # lister FLAG...: what the released one lists, as extents prints it
    snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n "$namespace" -o json "$@" |
        jq -c '.[].block_metadata[] | [.byte_offset // 0, .size_bytes]'
}

begin
start_cluster
apply base examples/backup-app
# A token for the sidecar: the pods of the example have theirs from a projected volume.
shell kubectl -n backup-app create role token --verb=create --resource=serviceaccounts/token --resource-name=backup-app
shell kubectl -n backup-app create rolebinding token --role=token --serviceaccount=backup-app:backup-app
kubeconfig_of backup-app backup-app
quietly kubectl create serviceaccount stranger
say "starting the driver, csi-snapshotter and the sidecar"
start_storage
shell kubectl get snapshotmetadataservices
take_snapshots
monday=$(handle_of monday) tuesday=$(handle_of tuesday)
say "from here on as ServiceAccount backup-app, which may read VolumeSnapshots in the namespace $namespace"
act_as backup-app
say "a full backup reads what holds data on monday"
show snapshot allocated monday --namespace "$namespace"
say "an incremental one reads what changed since"
show snapshot delta monday tuesday --namespace "$namespace"
say "the same with the lister of external-snapshot-metadata"
shell snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n "$namespace" -s tuesday -p monday
same allocated "$(extents allocated monday --namespace "$namespace")" "$(lister -s monday)"
same delta "$(extents delta monday tuesday --namespace "$namespace")" "$(lister -s tuesday -p monday)"
say "a ServiceAccount without that right is refused"
refused PERMISSION_DENIED as administrator show snapshot allocated monday --namespace "$namespace" --service-account stranger
say "is the incremental answer true? Comparing every byte of both on the driver's side"
show snapshot verify "$monday" "$tuesday"
remove_volume
