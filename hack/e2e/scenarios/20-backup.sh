#!/usr/bin/env bash
# Scenario: snapshots of a filesystem and of a block volume; three APIs agree; restores are equal
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

quietly kubectl apply --server-side -f hack/e2e/client.yaml
claim block 256Mi "volumeMode: Block"
user block-writer block
await condition=Ready -n backup-client pod/client

step "data, snapshots first and first-block"
in_pod writer 'head -c 33554432 /dev/urandom >/data/file; sync -f /data'
in_pod block-writer 'head -c 67108864 /dev/urandom | dd of=/device bs=1M conv=fsync 2>/dev/null'
files_first=$(in_pod writer 'cd /data; sha256sum file')
device_first=$(in_pod block-writer 'sha256sum </device')
snapshot first data
snapshot first-block block

step "changes, snapshots second and second-block"
in_pod writer 'dd if=/dev/urandom of=/data/file bs=1M count=1 seek=16 conv=notrunc,fsync 2>/dev/null; echo new >/data/new; sync -f /data'
in_pod block-writer 'dd if=/dev/urandom of=/device bs=1M count=1 seek=32 conv=notrunc,fsync 2>/dev/null
    dd if=/dev/urandom of=/device bs=4096 count=1 seek=25600 conv=notrunc,fsync 2>/dev/null'
files_second=$(in_pod writer 'cd /data; sha256sum file new')
device_second=$(in_pod block-writer 'sha256sum </device')
snapshot second data
snapshot second-block block

step "allocated and delta by SnapshotMetadata, sessions and the aggregated API"
equal "blocks of first-block" "0 67108864" "$(extents allocated first-block)"
equal "changes to second-block" $'33554432 1048576\n104857600 4096' "$(extents delta first-block second-block)"
[[ -n $(extents allocated second) ]]
changed=$(extents delta first second | awk '{ sum += $2 } END { print sum }')
((changed >= 1048576 && changed < 4194304)) || equal "bytes changed to second" "1 to 4 MiB" "$changed"

step "kubectl create on the aggregated API"
state=$(kubectl create -o jsonpath='{.status.state} {.status.changedBlocks[0].offset}' -f - <<'END'
apiVersion: cbt.storage.k8s.io/v1alpha1
kind: VolumeSnapshotDelta
metadata: {name: delta, namespace: backup-demo}
spec: {baseVolumeSnapshotName: first-block, targetVolumeSnapshotName: second-block, limit: 10000}
END
)
[[ $state == "Completed "* ]] || equal "state of VolumeSnapshotDelta" Completed "$state"

step "the applications of deploy/examples, by token and by session"
for application in backup-app backup-app-session; do
    quietly kubectl apply --server-side -k "deploy/examples/$application"
    for pod in backup-full backup-incremental; do
        await jsonpath='{.status.phase}=Succeeded' -n "$application" "pod/$pod"
        [[ $(kubectl -n "$application" logs "$pod") == *OFFSET* ]]
    done
done

step "restored claims have the bytes of their snapshots"
from_snapshot restored-first 1Gi first
from_snapshot restored-second 1Gi second
from_snapshot restored-block 256Mi first-block "volumeMode: Block"
from_snapshot restored-block-2 256Mi second-block "volumeMode: Block"
for name in restored-first restored-second restored-block restored-block-2; do user "$name" "$name"; done
equal "files of first" "$files_first" "$(in_pod restored-first 'cd /data; sha256sum file')"
equal "files of second" "$files_second" "$(in_pod restored-second 'cd /data; sha256sum file new')"
equal "device of first-block" "$device_first" "$(in_pod restored-block 'sha256sum </device')"
equal "device of second-block" "$device_second" "$(in_pod restored-block-2 'sha256sum </device')"

step "files of a snapshot on the node (snapshot mount)"
content=$(kubectl -n backup-demo get volumesnapshot first -o jsonpath='{.status.boundVolumeSnapshotContentName}')
handle=$(kubectl get volumesnapshotcontent "$content" -o jsonpath='{.status.snapshotHandle}')
mounted=/var/lib/kubelet/plugins/files
in_driver() { kubectl -n csi-loopback exec csi-loopback-0 -c driver -- sh -euc "$1"; }
in_driver "mkdir $mounted; export TMPDIR=/var/lib/kubelet/plugins CSI_ENDPOINT=unix:///csi/csi.sock
    /csi-loopback snapshot mount $handle $mounted & echo \$! >/tmp/mount; wait" >/dev/null &
mounting=$!
eventually on_node test -e "$mounted/file"
equal "files of first, mounted" "$files_first" "$(on_node sh -c "cd $mounted; sha256sum file")"
refused "Read-only file system" on_node touch "$mounted/new"
in_driver "kill \$(cat /tmp/mount); rm /tmp/mount"
wait "$mounting"
in_driver "rmdir $mounted"
equal "mounts below plugins/files" "" "$(on_node grep -F "$mounted" /proc/mounts || true)"
equal "temporary volumes" "" "$(on_node find /var/lib/kubelet/plugins -maxdepth 1 -name 'csi-loopback-verify-*')"

step "a delta from a deleted base"
handle=$(kubectl -n backup-demo get volumesnapshot first-block -o jsonpath='{.status.boundVolumeSnapshotContentName}')
handle=$(kubectl get volumesnapshotcontent "$handle" -o jsonpath='{.status.snapshotHandle}')
delete -n backup-demo volumesnapshot/first-block
found=$(extents_by metadata delta --base-id="$handle" second-block)
equal "changes from the deleted base" $'33554432 1048576\n104857600 4096' "$found"

discard -n backup-demo {pod,pvc}/restored-{first,second,block,block-2}
