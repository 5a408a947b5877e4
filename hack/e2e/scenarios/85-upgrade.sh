#!/usr/bin/env bash
# Scenario: the driver's pod is replaced by another image and back, under running pods
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

steady_writer
snapshot upgrade-1 steady
step "another tag of the image"
archive=$(IMAGE_DIR=$e2e/images IMAGE_TAG=0.1.0-next hack/image.sh csi-loopback)
quietly on_node ctr --namespace k8s.io images import "$archive"
rm "$archive"
upgraded=$overlay/upgraded
mkdir -p "$upgraded"
cat >"$upgraded/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../base]
images: [{name: csi-loopback, newTag: 0.1.0-next}]
END
image() { kubectl -n csi-loopback get pod csi-loopback-0 -o jsonpath='{.spec.containers[0].image}'; }
step "upgrade"
quietly kubectl apply --server-side -k "$upgraded"
rollout csi-loopback statefulset/csi-loopback
equal "the driver's image" csi-loopback:0.1.0-next "$(image)"
is_steady
snapshot upgrade-2 steady
[[ -n $(extents delta upgrade-1 upgrade-2) ]]
step "downgrade"
quietly kubectl apply --server-side -k "$overlay/base"
rollout csi-loopback statefulset/csi-loopback
equal "the driver's image" csi-loopback:0.1.0 "$(image)"
is_steady
delete -n "$namespace" volumesnapshot/upgrade-1 volumesnapshot/upgrade-2 pod/steady
delete -n "$namespace" pvc/steady
