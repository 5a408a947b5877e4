#!/usr/bin/env bash
# Scenario: install all components by docs/guide/install.md, and verify
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

step "definitions, node label, driver (deploy/base with cbt-http)"
quietly kubectl apply --server-side -f deploy/crds
quietly kubectl create -f deploy/crds-upstream
quietly kubectl label node node loopback.csi.local/pool=true
quietly kubectl apply --server-side -k "$(overlay_of base base cbt-http)"
step "session manager and aggregated API"
quietly kubectl apply --server-side -k deploy/session-manager
quietly kubectl apply --server-side -k deploy/aggregated-api
rollout csi-loopback statefulset/csi-loopback statefulset/csi-loopback-controller
rollout csi-loopback-sessions deployment/csi-loopback-session-manager
rollout csi-loopback-aggregated deployment/csi-loopback-aggregated-api
step "a volume and a pod that uses it (deploy/examples/volume)"
quietly kubectl apply --server-side -k deploy/examples/volume
await condition=Ready -n backup-demo pod/writer
step "published endpoints"
endpoint=$(kubectl get snapshotmetadataservices loopback.csi.local -o jsonpath='{.spec.address} {.spec.audience}')
equal endpoint "csi-loopback-metadata.csi-loopback.svc:6443 snapshot-metadata.loopback.csi.local" "$endpoint"
await condition=Available apiservice/v1alpha1.cbt.storage.k8s.io
await condition=EndpointReachable driverdiscovery/loopback.csi.local
