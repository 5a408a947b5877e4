#!/usr/bin/env bash
# Scenario: the released snapshot-metadata-lister and -verifier, as pods, with snapshots of the released csi-snapshotter
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

namespace=upstream-cbt

clean_up() {
    kubectl delete --ignore-not-found --timeout="${patience}s" namespace "$namespace" >/dev/null 2>&1 || true
    kubectl delete --ignore-not-found clusterrolebinding "$namespace" >/dev/null 2>&1 || true
}
trap clean_up EXIT

# run_tool POD TOOL SOURCE TARGET ARGUMENT...: runs a tool in a pod to its end, with the claims SOURCE and TARGET as devices
# unless they are empty, and prints its output. Fails if the tool fails.
run_tool() {
    local pod=$1 tool=$2 source=$3 target=$4 devices='' volumes='' phase
    shift 4
    [[ -z $source ]] || {
        devices="volumeDevices: [{name: source, devicePath: /source}, {name: target, devicePath: /target}]"
        volumes="volumes: [{name: source, persistentVolumeClaim: {claimName: $source}}, {name: target, persistentVolumeClaim: {claimName: $target}}]"
    }
    apply <<END
apiVersion: v1
kind: Pod
metadata: {name: $pod, namespace: $namespace}
spec:
  serviceAccountName: client
  restartPolicy: Never
  containers:
    - name: main
      image: localhost/$tool:e2e
      args: $(jq -cn '$ARGS.positional' --args -- "-namespace=$namespace" "$@")
      securityContext: {privileged: true}
      $devices
  $volumes
END
    eventually has_ended "$namespace" "$pod" || return 1
    kubectl -n "$namespace" logs "$pod"
    phase=$(kubectl -n "$namespace" get pod "$pod" -o jsonpath='{.status.phase}')
    [[ $phase == Succeeded ]]
}

# lists POD EXPECTED ARGUMENT...: whether the lister prints these extents, adjacent ones joined.
lists() {
    local pod=$1 expected=$2 found
    shift 2
    found=$(run_tool "$pod" snapshot-metadata-lister "" "" -output-format=json "$@") || {
        printf '%s\n' "$found" >&2
        return 1
    }
    found=$(jq -r '.[].block_metadata[] | "\(.byte_offset // 0) \(.size_bytes)"' <<<"$found" | join_extents)
    equal "extents of $*" "$expected" "$found"
}

verifies() { # verifies POD SOURCE TARGET ARGUMENT...
    local output
    output=$(run_tool "$1" snapshot-metadata-verifier "$2" "$3" -source-device-path=/source -target-device-path=/target "${@:4}") || {
        printf '%s\n' "$output" >&2
        return 1
    }
}

# released NAME: whether the container NAME of the driver's pods runs the image of that release, which took the snapshots.
released() {
    local found
    found=$(kubectl -n csi-loopback get pods -o jsonpath="{.items[*].spec.containers[?(@.name=='$1')].image}")
    equal "image of $1" "$(image_of "$1")" "$found"
}

step "images, a namespace, the rights of a backup application"
for tool in snapshot-metadata-lister snapshot-metadata-verifier; do
    program_image "$e2e/tools/$tool" "localhost/$tool:e2e" "$tool"
    load_image "$e2e/images/$tool.tar"
done
apply <<END
apiVersion: v1
kind: Namespace
metadata: {name: $namespace}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: client, namespace: $namespace}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: $namespace}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: e2e-client}
subjects: [{kind: ServiceAccount, name: client, namespace: $namespace}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: tokens, namespace: $namespace}
rules: [{apiGroups: [""], resources: [serviceaccounts/token], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: tokens, namespace: $namespace}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: tokens}
subjects: [{kind: ServiceAccount, name: client, namespace: $namespace}]
END
quietly kubectl apply --server-side -f hack/e2e/client.yaml
claim data 256Mi "volumeMode: Block"
user writer data
step "three snapshots of a block volume"
in_pod writer 'head -c 67108864 /dev/urandom | dd of=/device bs=1M conv=fsync 2>/dev/null'
snapshot first data
in_pod writer 'dd if=/dev/urandom of=/device bs=1M count=1 seek=32 conv=notrunc,fsync 2>/dev/null
    dd if=/dev/urandom of=/device bs=4096 count=1 seek=25600 conv=notrunc,fsync 2>/dev/null'
snapshot second data
from_snapshot source 256Mi second "volumeMode: Block"
from_snapshot target 256Mi first "volumeMode: Block"
claim blank 256Mi "volumeMode: Block"
claim other 256Mi "volumeMode: Block"
handle=$(kubectl -n "$namespace" get volumesnapshot first -o jsonpath='{.status.boundVolumeSnapshotContentName}')
handle=$(kubectl get volumesnapshotcontent "$handle" -o jsonpath='{.status.snapshotHandle}')
changes=$'33554432 1048576\n104857600 4096'

check "csi-snapshotter is the released one" released csi-snapshotter
check "lister: allocated blocks" lists allocated "0 67108864" -snapshot=first
check "lister: changed blocks" lists changed "$changes" -snapshot=second -previous-snapshot=first
check "lister: changed blocks, 1 a message" lists one-each "$changes" -snapshot=second -previous-snapshot=first -max-results=1
check "lister: changed blocks from an offset" lists offset "104857600 4096" -snapshot=second -previous-snapshot=first -starting-offset=40000000
check "verifier: allocated blocks onto zeros" verifies full source blank -snapshot=second
check "verifier: changed blocks onto the base" verifies incremental source target -snapshot=second -previous-snapshot=first
check "verifier: changed blocks onto another device must fail" \
    refused "contents do not match" verifies wrong source other -snapshot=second -previous-snapshot=first
delete -n "$namespace" volumesnapshot/first
check "lister: changed blocks from a deleted base" lists deleted "$changes" -snapshot=second "-previous-snapshot-id=$handle"
count "upstream CBT tools" "$passed" "$failed" 0
