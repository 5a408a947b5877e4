#!/usr/bin/env bash
# Suite: Velero with its plugin for S3 backs up and restores volumes by CSI snapshot data movement, as in docs/guide/velero.md
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

namespace=velero-demo
copy=velero-demo-copy
work=$e2e/velero
tools=$(go_cached "$(go_key velero)" Velero "about five minutes" go_build velero)
class=volumesnapshotclass/csi-loopback
label=velero.io/csi-volumesnapshot-class

clean_up() {
    rm -rf "$work"
    kubectl delete --ignore-not-found --timeout="${patience}s" namespace "$namespace" "$copy" >/dev/null 2>&1 || true
    velero uninstall --force >/dev/null 2>&1 || true
    kubectl label "$class" "$label-" >/dev/null 2>&1 || true
}
trap clean_up EXIT

velero() { in_network timeout 900 "$tools/velero" --kubeconfig "$e2e/kubeconfig" "$@"; }

version() { (cd hack/tools/velero && go list -m -f '{{.Version}}' "github.com/vmware-tanzu/$1"); }

image() { # image NAME ENTRYPOINT: an image with the files of $work/root, on the node
    chmod 755 "$work/root"
    oci_layer "$work/root" "$work/layer"
    oci_image "$work/image.tar" "$1" "{\"Entrypoint\": $2}" "$work/layer"
    load_image "$work/image.tar"
    rm -r "$work/root" "$work/layer"
}

# completed KIND NAME: whether a backup or restore has ended without an error.
completed() {
    equal "phase of $1 $2" Completed "$(kubectl -n velero get "$1s.velero.io" "$2" -o jsonpath='{.status.phase}')" || {
        kubectl -n velero logs deployment/velero | grep level=error | tail -n 20 >&2
        return 1
    }
}

back_up() { # back_up NAME
    quietly velero backup create "$1" --include-namespaces "$namespace" --snapshot-move-data --item-operation-timeout 10m --wait &&
        completed backup "$1"
}

restore() { # restore BACKUP [OPTION...]
    quietly velero restore create "$1" --from-backup "$1" --item-operation-timeout 10m --wait "${@:2}" && completed restore "$1"
}

# uploaded BACKUP CLAIM MINIMUM: whether a claim's upload has completed and has read this many bytes.
uploaded() {
    local phase total
    read -r phase total < <(kubectl -n velero get datauploads -l "velero.io/backup-name=$1" -o json | jq -r --arg claim "$2" \
        '.items[] | select(.spec.sourcePVC == $claim) | "\(.status.phase) \(.status.progress.bytesDone)"')
    step "backup $1, claim $2: $phase, $total bytes"
    [[ $phase == Completed ]] && ((total >= $3))
}

# stored: how many bytes of backup repositories the S3 server has.
stored() {
    kubectl get --raw '/api/v1/namespaces/velero/services/s3:9000/proxy/backups?list-type=2&prefix=kopia/' |
        grep -oE '<Size>[0-9]+' | awk -F '>' '{ bytes += $2 } END { printf "%d\n", bytes }'
}

# stored_since BYTES MINIMUM MAXIMUM: whether the repositories have grown by so many bytes.
stored_since() {
    local new
    new=$(($(stored) - $1))
    step "$new new bytes are stored"
    ((new >= $2 && new <= $3))
}

# snapshots_are_gone: whether Velero has deleted its snapshots, and the claims that it made of them.
snapshots_are_gone() {
    local rest
    rest=$(kubectl get volumesnapshots,persistentvolumeclaims --all-namespaces -o json | jq -r --arg namespace "$namespace" \
        '.items[] | "\(.metadata.namespace) \(.kind) \(.metadata.name)" | select(test("^(velero |" + $namespace + " VolumeSnapshot )"))') &&
        equal "what remains" "" "$rest"
}

# volumes_are_gone_of NAMESPACE: whether the namespace, which is deleted, has no PersistentVolume.
volumes_are_gone_of() {
    local rest
    rest=$(kubectl get persistentvolumes -o json |
        jq -r --arg namespace "$1" '.items[] | select(.spec.claimRef.namespace == $namespace) | .metadata.name') &&
        equal "volumes of $1" "" "$rest"
}

# files, device: what the volumes contain.
files() {
    in_pod files 'cd /data; find . -type f -exec sha256sum {} + | sort; find . ! -name lost+found -exec stat -c "%n %F %a %u:%g" {} + | sort'
}
device() { in_pod device 'sha256sum </device'; }

is_restored() { # is_restored VOLUME EXPECTED
    await condition=Ready -n "$namespace" "pod/$1" && equal "$1 in $namespace" "$2" "$("$1")"
}

step "images of Velero and its plugin for S3"
velero_image=docker.io/velero/velero:$(version velero)
plugin_image=docker.io/velero/velero-plugin-for-aws:$(version velero-plugin-for-aws)
mkdir -p "$work/root"
mkdir -m 1777 "$work/root/tmp"
install -m 755 -t "$work/root" "$tools/velero"
image "$velero_image" '[]'
install -D -m 755 -t "$work/root/plugins" "$tools/velero-plugin-for-aws"
install -D -m 755 -t "$work/root/bin" "$tools/cp-plugin"
image "$plugin_image" '["/bin/cp-plugin", "/plugins/velero-plugin-for-aws", "/target/velero-plugin-for-aws"]'

step "an S3 server, and Velero $(version velero) with node agent, by velero install"
s3_server velero
printf '[default]\naws_access_key_id = local\naws_secret_access_key = not-a-real-key\n' >"$work/credentials"
quietly velero install --image "$velero_image" --plugins "$plugin_image" --provider aws --bucket backups \
    --secret-file "$work/credentials" \
    --backup-location-config region=local,s3ForcePathStyle=true,s3Url=http://s3.velero.svc:9000,checksumAlgorithm= \
    --use-node-agent --privileged-node-agent --features EnableCSI --use-volume-snapshots=false \
    --velero-pod-cpu-request 0 --node-agent-pod-cpu-request 0
rollout velero deployment/velero daemonset/node-agent
await jsonpath='{.status.phase}=Available' -n velero backupstoragelocation/default
quietly kubectl label --overwrite "$class" "$label=true"

step "a filesystem and a block volume"
quietly kubectl create namespace "$namespace"
claim files 128Mi
claim device 128Mi "volumeMode: Block"
user files files
user device device
in_pod files 'head -c 33554432 /dev/urandom >/data/large; mkdir -m 750 /data/directory; echo small >/data/directory/small
    chmod 640 /data/directory/small; chown 1000:2000 /data/directory/small; ln -s directory/small /data/link; sync -f /data'
in_pod device 'head -c 33554432 /dev/urandom | dd of=/device bs=1M seek=16 conv=notrunc,fsync 2>/dev/null'
files_first=$(files)
device_first=$(device)

check "a backup" back_up first
check "all files of the filesystem volume" uploaded first files 33554432
check "all bytes of the block volume" uploaded first device 134217728
check "the repository has both volumes, without zeros" stored_since 0 67108864 83886080
check "no snapshot remains after the backup" eventually snapshots_are_gone

in_pod files 'echo changed >/data/directory/small; head -c 1048576 /dev/urandom >/data/new; rm /data/link; sync -f /data'
in_pod device 'dd if=/dev/urandom of=/device bs=1M count=1 seek=64 conv=notrunc,fsync 2>/dev/null'
files_second=$(files)
device_second=$(device)
before=$(stored)
check "a second backup" back_up second
check "files of the filesystem volume after changes" uploaded second files 34603008
check "bytes of the block volume after changes" uploaded second device 134217728
check "the repository has grown by the changes" stored_since "$before" 2097152 25165824

delete namespace "$namespace"
eventually volumes_are_gone_of "$namespace"
check "a restore of the deleted namespace" restore second
check "files of the second backup" is_restored files "$files_second"
check "device of the second backup" is_restored device "$device_second"
check "a restore of the first backup into another namespace" restore first --namespace-mappings "$namespace:$copy"
namespace=$copy check "files of the first backup" is_restored files "$files_first"
namespace=$copy check "device of the first backup" is_restored device "$device_first"

clean_up
for name in "$namespace" "$copy" velero; do
    check "no volume of $name remains" eventually volumes_are_gone_of "$name"
done
count Velero "$passed" "$failed" 0
