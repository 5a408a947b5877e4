#!/usr/bin/env bash
# Scenario: uninstall by docs/guide/install.md leaves no object, mount, loop device or file
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

step "applications, volumes and snapshots"
delete namespace/backup-app namespace/backup-app-session namespace/backup-client
quietly kubectl delete --timeout="${patience}s" snapshotsessionrequests --all --all-namespaces
delete clusterrole/e2e-client clusterrolebinding/e2e-client
delete -k deploy/examples/backup-app
delete -k deploy/examples/backup-app-session
delete -k deploy/examples/backup-to-s3
delete namespace/backup-demo
eventually volumes_are_gone
step "session manager, aggregated API, driver, definitions"
delete -k deploy/session-manager
delete apiservice v1alpha1.cbt.storage.k8s.io
delete -k deploy/aggregated-api
delete -k "$overlay/base"
delete snapshotmetadataservice,snapshotserviceconfiguration loopback.csi.local
delete driverdiscovery loopback.csi.local
delete -f deploy/crds
# Of another project, so it remains.
quietly kubectl get crd snapshotmetadataservices.cbt.storage.k8s.io
delete -f deploy/crds-upstream
quietly kubectl label node node loopback.csi.local/pool-
step "what remains"
kinds=all,csidrivers,storageclasses,clusterroles,clusterrolebindings,customresourcedefinitions,flowschemas
kinds+=,validatingadmissionpolicies,mutatingwebhookconfigurations,validatingwebhookconfigurations
equal "objects" "" "$(kubectl get "$kinds" --all-namespaces -o name | grep -E 'loopback|cbt\.storage' || true)"
equal "drivers of the node" "" "$(kubectl get csinode node -o jsonpath='{.spec.drivers[*].name}')"
equal mounts "" "$(on_node grep -E '^/dev/loop' /proc/mounts || true)"
# By inode, so before the files are removed: another cluster on this machine has files of the same names.
equal "loop devices" "" "$(our_loops)"
on_node rm -r /var/lib/csi-loopback /var/lib/kubelet/plugins/loopback.csi.local
equal "files" "" "$(on_node find /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry /var/lib -maxdepth 1 -name '*loopback*' || true)"
