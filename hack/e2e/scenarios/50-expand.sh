#!/usr/bin/env bash
# Scenario: claims grow while pods use them
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

# The kernel grows a mounted ext4 only with CAP_SYS_RESOURCE, which root of this machine may lack.
apply <<END
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: e2e-xfs}
provisioner: loopback.csi.local
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
parameters: {csi.storage.k8s.io/fstype: xfs}
END
claim grown 400Mi "storageClassName: e2e-xfs"
claim grown-block 64Mi "volumeMode: Block"
user grown grown
user grown-block grown-block
in_pod grown 'echo kept >/data/file'

grow() { # grow CLAIM SIZE
    quietly kubectl -n "$namespace" patch pvc "$1" --type merge -p "{\"spec\": {\"resources\": {\"requests\": {\"storage\": \"$2\"}}}}"
    await "jsonpath={.status.capacity.storage}=$2" -n "$namespace" "pvc/$1"
}

step "a filesystem"
before=$(in_pod grown 'stat -f --format "%b" /data')
grow grown 800Mi
after=$(in_pod grown 'stat -f --format "%b" /data')
((after > before * 3 / 2)) || equal "blocks of the filesystem" "more than $before" "$after"
equal "the file" kept "$(in_pod grown 'cat /data/file')"
step "a block device"
grow grown-block 128Mi
equal "bytes of the device" 134217728 "$(in_pod grown-block 'blockdev --getsize64 /device')"
discard -n "$namespace" {pod,pvc}/grown{,-block}
discard storageclass/e2e-xfs
