#!/usr/bin/env bash
# Scenario: conformance --kubernetes as a Job (deploy/conformance), against the driver through its sidecar
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

namespace=csi-loopback-conformance

clean_up() { kubectl delete --ignore-not-found --timeout="${patience}s" -k deploy/conformance >/dev/null 2>&1 || true; }
trap clean_up EXIT

# leftovers: the objects of a run that remain, apart from the ServiceAccounts of the namespace.
leftovers() {
    kubectl -n "$namespace" get pvc,volumesnapshots,pods,serviceaccounts --no-headers -o name | grep -E '/conformance-[0-9a-f]{8}-' || true
    kubectl get persistentvolumes,volumesnapshotcontents -o json |
        jq -r --arg namespace "$namespace" '.items[] | select((.spec.claimRef // .spec.volumeSnapshotRef).namespace == $namespace) |
            "\(.kind)/\(.metadata.name)"'
}

# report: what the Job has printed, as JSON.
report() { kubectl -n "$namespace" logs job/conformance; }

step "the Job, whose report is JSON here"
kubectl kustomize deploy/conformance >"$e2e/conformance.yaml"
sed -i 's|^\( *\)- --image=csi-loopback:0.1.0|&\n\1- --report=json|' "$e2e/conformance.yaml"
apply <"$e2e/conformance.yaml"
started=$SECONDS
until [[ $(kubectl -n "$namespace" get job conformance -o jsonpath='{.status.conditions[*].type}') =~ Complete|Failed ]]; do
    ((SECONDS - started < 600)) || break
    sleep 1
done
step "the verdict"
report | jq -r '"\(.passed) passed, \(.failed.must + .failed.data) failed, \(.advice) advice, \(.skipped) skipped, \(.seconds | floor) s"'
equal "rules that failed" "" "$(report | jq -r '.rules[] | select(.result == "failed") | "\(.id): \(.seen)"')"
skipped=$'deadline\nsnapshot-deleted\nstatus-details'
equal "rules that were skipped" "$skipped" "$(report | jq -r '.rules[] | select(.result == "skipped") | .id' | sort)"
equal "the Job" 1 "$(kubectl -n "$namespace" get job conformance -o jsonpath='{.status.succeeded}')"
equal "what remains" "" "$(leftovers)"
