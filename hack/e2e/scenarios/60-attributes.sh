#!/usr/bin/env bash
# Scenario: VolumeAttributesClasses change the tracking of a volume in use
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

for value in true false; do
    apply <<END
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: e2e-tracking-$value}
driverName: loopback.csi.local
parameters: {changeTracking: "$value"}
END
done
claim tracked 64Mi "volumeAttributesClassName: e2e-tracking-true"
user tracked tracked
snapshot tracked-1 tracked
step "tracking off and on again"
for value in false true; do
    quietly kubectl -n "$namespace" patch pvc tracked --type merge -p "{\"spec\": {\"volumeAttributesClassName\": \"e2e-tracking-$value\"}}"
    await "jsonpath={.status.currentVolumeAttributesClassName}=e2e-tracking-$value" -n "$namespace" pvc/tracked
done
snapshot tracked-2 tracked
snapshot tracked-3 tracked
step "no delta across the gap, one after it"
refusal=$(extents_by metadata delta tracked-1 tracked-2 2>&1) && die "a delta across the gap was returned: $refusal"
[[ $refusal == *FAILED_PRECONDITION* || $refusal == *"full backup"* ]] || equal "the refusal" FAILED_PRECONDITION "$refusal"
extents_by metadata delta tracked-2 tracked-3 >/dev/null
discard -n "$namespace" volumesnapshot/tracked-{1,2,3} {pod,pvc}/tracked
discard volumeattributesclass/e2e-tracking-{true,false}
