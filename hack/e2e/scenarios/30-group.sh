#!/usr/bin/env bash
# Scenario: VolumeGroupSnapshot of two claims, a restore of each member, and its backup as a set
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

step "two claims with a label, one write to each"
for name in group-a group-b; do
    claim "$name" 64Mi
    quietly kubectl -n "$namespace" label pvc "$name" application=group
    user "$name" "$name"
    in_pod "$name" "echo $name >/data/file; sync -f /data"
done
step "VolumeGroupSnapshot"
apply <<END
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshotClass
metadata: {name: csi-loopback}
driver: loopback.csi.local
deletionPolicy: Delete
---
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshot
metadata: {name: group, namespace: $namespace}
spec: {volumeGroupSnapshotClassName: csi-loopback, source: {selector: {matchLabels: {application: group}}}}
END
await jsonpath='{.status.readyToUse}=true' -n "$namespace" volumegroupsnapshot/group
members=$(kubectl -n "$namespace" get volumesnapshots -o json |
    jq -r '.items[] | select(.metadata.ownerReferences[]?.kind == "VolumeGroupSnapshot") | "\(.spec.source.persistentVolumeClaimName) \(.metadata.name)"' | sort)
equal "number of members" 2 "$(wc -l <<<"$members")"
step "a claim from each member"
while read -r source member; do
    await jsonpath='{.status.readyToUse}=true' -n "$namespace" "volumesnapshot/$member"
    from_snapshot "$source-restored" 64Mi "$member"
    user "$source-restored" "$source-restored"
    equal "file of $source" "$source" "$(in_pod "$source-restored" 'cat /data/file')"
    discard -n "$namespace" "pod/$source-restored" "pvc/$source-restored"
done <<<"$members"
step "backup as a set by mover pods, a copy of it, and a restore to new claims"
quietly kubectl apply --server-side -k deploy/examples/mover
quietly kubectl apply --server-side -f hack/e2e/client.yaml
await condition=Ready -n backup-client pod/client
claim backups 512Mi
equal "complete members" 2 "$(backup_command backup create group --group --output json | jq 'map(select(.group_complete)) | length')"
equal "copied backups" 2 "$(backup_command backup copy --to claim:backups/copy --output json | jq '.copied | length')"
quietly backup_command restore group --group --to-claim again --storage-class csi-loopback --volume-mode filesystem
eventually movers_are_gone
for name in group-a group-b; do
    user "again-$name" "again-$name"
    equal "file of $name" "$name" "$(in_pod "again-$name" 'cat /data/file')"
    discard -n "$namespace" "pod/again-$name" "pvc/again-$name" "pod/$name" "pvc/$name"
done
discard -n "$namespace" pvc/backups
delete -n "$namespace" volumegroupsnapshot/group
discard volumegroupsnapshotclass/csi-loopback
