#!/usr/bin/env bash
# Scenario: rollout of another tag of the same image under running pods, and back; drain of the node
# The program does not change: tests/storage/former_release.rs reads the data of released versions.
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

steady_writer
snapshot upgrade-1 steady
step "another tag of the same image"
quietly on_node ctr --namespace k8s.io images tag --force docker.io/library/csi-loopback:0.1.0 docker.io/library/csi-loopback:0.1.0-next
upgraded=$overlay/upgraded
mkdir -p "$upgraded"
cat >"$upgraded/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../base]
images: [{name: csi-loopback, newTag: 0.1.0-next}]
END
image() { kubectl -n csi-loopback get pod csi-loopback-0 -o jsonpath='{.spec.containers[0].image}'; }
step "rollout"
quietly kubectl apply --server-side -k "$upgraded"
rollout csi-loopback statefulset/csi-loopback
equal "the driver's image" csi-loopback:0.1.0-next "$(image)"
eventually is_steady
snapshot upgrade-2 steady
[[ -n $(extents delta upgrade-1 upgrade-2) ]]
step "rollout of the first tag"
quietly kubectl apply --server-side -k "$overlay/base"
rollout csi-loopback statefulset/csi-loopback
equal "the driver's image" csi-loopback:0.1.0 "$(image)"
eventually is_steady
step "drain"
# Without eviction: disruption budgets keep one of two replicas on the only node. Pods without a controller end for good.
quietly kubectl drain node --ignore-daemonsets --delete-emptydir-data --force --disable-eviction --timeout="${patience}s"
volumes_are_unmounted() { ! on_node grep -E '/var/lib/kubelet/(pods/.*/kubernetes.io~csi|plugins/kubernetes.io/csi)/' /proc/mounts; }
eventually volumes_are_unmounted
quietly kubectl uncordon node
rollout csi-loopback statefulset/csi-loopback statefulset/csi-loopback-controller
rollout csi-loopback-sessions deployment/csi-loopback-session-manager
rollout csi-loopback-aggregated deployment/csi-loopback-aggregated-api
await condition=Ready -n kube-system pod --selector app.kubernetes.io/name=snapshot-controller
quietly kubectl apply --server-side -f hack/e2e/client.yaml
await condition=Ready -n backup-client pod/client
user drained steady
[[ $(in_pod drained 'wc -l </data/log') -gt 0 ]]
delete -n "$namespace" volumesnapshot/upgrade-{1,2} pod/drained pvc/steady
