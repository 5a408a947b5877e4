#!/usr/bin/env bash
# Scenario: full and incremental backup by mover pods from deleted bases, restore to new claims
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

# same WHAT OUTPUT FILTER VALUE: whether a field of the result has the value.
same() { equal "$1" "$4" "$(jq -r "$3" <<<"$2")"; }

step "ServiceAccount of the movers (deploy/examples/mover), a claim for backups, two volumes"
quietly kubectl apply --server-side -k deploy/examples/mover
claim backups 1Gi
claim orders 256Mi "volumeMode: Block"
claim files 128Mi
user orders orders
user files files
in_pod orders 'head -c 201326592 /dev/urandom | dd of=/device bs=1M conv=fsync 2>/dev/null'
in_pod files 'head -c 8388608 /dev/urandom >/data/file; sync -f /data'
snapshot orders-1 orders
snapshot files-1 files

step "full backups: of a block volume, and of a filesystem, read as a block device"
made=$(backup_command backup create orders-1 --output json)
same "kind of orders-1" "$made" '"\(.kind) \(.volume) \(.data_bytes)"' "full orders 201326592"
made=$(backup_command backup create files-1 --output json)
same "kind of files-1" "$made" '"\(.kind) \(.volume)"' "full files"

step "a mover pod that is killed after it has written is replaced, and continues"
again=$(mktemp)
backup_command backup create orders-1 --full >"$again" &
mover_pod() { kubectl -n "$namespace" get pods --selector app.kubernetes.io/name=csi-loopback-mover -o name | grep .; }
# in_mover SCRIPT: in the only mover pod. Attempts are in the directory "backups" of the path "backups" of the claim.
in_mover() { kubectl -n "$namespace" exec "$(mover_pod)" -- sh -c "cd /repository/backups/backups && $1"; }
# Of an attempt that is not complete yet.
# shellcheck disable=SC2016 # $id is for the shell in the pod
has_written() { in_mover 'for id in *; do [ -e "$id/manifest" ] || ls "$id/pages"; done 2>/dev/null | grep -q .'; }
eventually has_written
# A fast mover would complete the backup before kubelet ends it.
mover=$(mover_pod)
on_node kill -STOP "$(process_of "$namespace" "${mover#pod/}" mover)"
has_written
discard -n "$namespace" --force --grace-period=0 "$mover"
wait $!
[[ $(<"$again") == *"continued and complete"* ]]
rm "$again"

step "changes, a deleted base, incremental backups"
in_pod orders 'dd if=/dev/urandom of=/device bs=4096 count=1 seek=9000 conv=notrunc,fsync 2>/dev/null'
in_pod files 'echo new >/data/new; sync -f /data'
orders=$(in_pod orders 'sha256sum </device')
sums=$(in_pod files 'cd /data; sha256sum file new')
snapshot orders-2 orders
snapshot files-2 files
delete -n "$namespace" volumesnapshot/orders-1 volumesnapshot/files-1
made=$(backup_command backup create orders-2 --output json)
same "kind of orders-2" "$made" '"\(.kind) \(.data_bytes)"' "incremental 4096"
made=$(backup_command backup create files-2 --output json)
same "kind of files-2" "$made" .kind incremental
equal "backups" 5 "$(backup_command backup list --output json | jq length)"
[[ $(backup_command backup verify) == *"no damage found"* ]]

step "restore to new claims, in block and in filesystem mode"
quietly backup_command restore orders-2 --to-claim orders-restored --storage-class csi-loopback
quietly backup_command restore files-2 --to-claim files-restored --storage-class csi-loopback --volume-mode filesystem
user orders-restored orders-restored
user files-restored files-restored
equal "device of orders-2" "$orders" "$(in_pod orders-restored 'sha256sum </device')"
equal "files of files-2" "$sums" "$(in_pod files-restored 'cd /data; sha256sum file new')"

step "nothing of the movers remains"
eventually movers_are_gone
for name in orders orders-restored files files-restored; do discard -n "$namespace" "pod/$name" "pvc/$name"; done
discard -n "$namespace" volumesnapshot/files-2 volumesnapshot/orders-2
# The scenario "group" makes another.
delete -n "$namespace" pvc/backups
