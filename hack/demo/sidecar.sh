# shellcheck shell=bash disable=SC2154
# Scene: the same as a backup application sees it, through a real Kubernetes API server (needs Go)

# same_as_lister COMMAND... -- FLAG...: compares the extents with those of the released lister.
same_as_lister() {
    local ours theirs command=()
    while [[ $1 != -- ]]; do
        command+=("$1")
        shift
    done
    shift
    ours=$("$driver" "${command[@]}" --output json | jq -c '.extents[] | [.offset, .length]')
    theirs=$(snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n "$namespace" "$@" -o json |
        jq -c '.[].block_metadata[] | [.byte_offset // 0, .size_bytes]')
    [[ $ours == "$theirs" ]] || die "the released lister says something else"
    say "both list the same $(wc -l <<<"$theirs") extents"
}

begin curl
start_cluster
apply base examples/backup-app
# A token for the sidecar: the example's pods have theirs from a projected volume.
kubectl -n backup-app create role own-token --verb=create --resource=serviceaccounts/token --resource-name=backup-app
kubectl -n backup-app create rolebinding own-token --role=own-token --serviceaccount=backup-app:backup-app
kubectl -n backup-app create serviceaccount stranger

say "starting the driver, csi-snapshotter and the sidecar"
start_driver
start_snapshotter
start_sidecar
shell kubectl get snapshotmetadataservices
take_snapshots
monday=$(handle_of monday) tuesday=$(handle_of tuesday)

say "from here on as ServiceAccount backup-app, which may read VolumeSnapshots in the namespace $namespace"
kubeconfig_of backup-app backup-app
act_as backup-app
say "a full backup reads what holds data on monday"
show snapshot allocated monday --namespace "$namespace"
same_as_lister snapshot allocated monday --namespace "$namespace" -- -s monday
say "an incremental one reads what changed since"
show snapshot delta monday tuesday --namespace "$namespace"
say "the same with the lister of external-snapshot-metadata"
shell snapshot-metadata-lister -kubeconfig "$KUBECONFIG" -n "$namespace" -s tuesday -p monday
same_as_lister snapshot delta monday tuesday --namespace "$namespace" -- -s tuesday -p monday

say "a ServiceAccount without that right is refused"
act_as administrator
refused PERMISSION_DENIED show snapshot allocated monday --namespace "$namespace" \
    --service-account stranger --service-account-namespace backup-app

say "is the incremental answer true? Comparing every byte of both on the driver's side"
show snapshot verify "$monday" "$tuesday"
remove_volume
