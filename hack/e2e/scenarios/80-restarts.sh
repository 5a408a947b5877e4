#!/usr/bin/env bash
# Scenario: each part is killed while a snapshot is taken; no write, snapshot or change is lost
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

steady_writer
claim restarts 64Mi "volumeMode: Block"
user restarts restarts
snapshot restarts-0 restarts
number=0

# kills PART COMMAND...: a change of one block, and a snapshot during which the command kills the part; then the delta is that block.
kills() {
    local part=$1 base=restarts-$number changes
    shift
    number=$((number + 1))
    step "$part"
    eventually in_pod restarts "head -c 4096 /dev/urandom | dd of=/device bs=4096 seek=$((number * 256)) conv=notrunc,fsync 2>/dev/null"
    request_snapshot "restarts-$number" restarts
    "$@"
    eventually kubectl -n "$namespace" wait --timeout=10s --for=jsonpath='{.status.readyToUse}=true' "volumesnapshot/restarts-$number"
    eventually extents_by metadata delta "$base" "restarts-$number"
    changes=$(extents_by metadata delta "$base" "restarts-$number")
    equal "the change after $part" "$((number * 1048576)) 4096" "$changes"
}

kills driver kill_container csi-loopback csi-loopback-0 driver
kills freeze-guard kill_container csi-loopback csi-loopback-0 freeze-guard
kills sidecar kill_container csi-loopback csi-loopback-0 metadata
kills csi-snapshotter kill_container csi-loopback csi-loopback-controller-0 csi-snapshotter
kills "the driver's pod" delete -n csi-loopback pod/csi-loopback-0 --grace-period=1
kills kubelet restart kubelet
kills containerd restart containerd
kills "API server" restart kube-apiserver
step "the pod that writes all the time"
eventually is_steady
rollout csi-loopback statefulset/csi-loopback statefulset/csi-loopback-controller
for ((i = 0; i <= number; i++)); do delete -n "$namespace" "volumesnapshot/restarts-$i"; done
delete -n "$namespace" {pod,pvc}/{restarts,steady}
