#!/usr/bin/env bash
# Scenario: the node reboots: all processes killed, mounts and loop devices gone; pods resume with their data
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

claim rebooted 128Mi
user rebooted rebooted
in_pod rebooted 'head -c 8388608 /dev/urandom >/data/file; sync -f /data'
before=$(in_pod rebooted 'sha256sum /data/file')
snapshot reboot-1 rebooted
in_pod rebooted 'echo changed >/data/changed; sync -f /data'
sandbox() { kubectl -n "$1" get pod "$2" -o jsonpath='{.status.podIP} {.status.containerStatuses[0].restartCount}'; }
old=$(sandbox "$namespace" rebooted)
old_driver=$(sandbox csi-loopback csi-loopback-0)
step "reboot"
reboot
has_restarted() { # has_restarted NAMESPACE POD OLD
    [[ $(sandbox "$1" "$2") != "$3" ]] && kubectl -n "$1" wait --for=condition=Ready --timeout=1s "pod/$2"
}
step "the driver, and the pod with its data"
eventually has_restarted csi-loopback csi-loopback-0 "$old_driver"
eventually has_restarted "$namespace" rebooted "$old"
equal "the file" "$before" "$(in_pod rebooted 'sha256sum /data/file')"
equal "the synced change" changed "$(in_pod rebooted 'cat /data/changed')"
step "a delta across the reboot"
rollout csi-loopback statefulset/csi-loopback-controller
rollout csi-loopback-sessions deployment/csi-loopback-session-manager
rollout csi-loopback-aggregated deployment/csi-loopback-aggregated-api
snapshot reboot-2 rebooted
eventually extents delta reboot-1 reboot-2
[[ -n $(extents delta reboot-1 reboot-2) ]]
delete -n "$namespace" volumesnapshot/reboot-{1,2} {pod,pvc}/rebooted
