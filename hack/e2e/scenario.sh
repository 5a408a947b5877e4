# shellcheck shell=bash
# What the scenarios and suites of hack/e2e.sh share. A scenario is a script that sources this file, runs against the cluster
# by kubectl and the manifests of deploy/, and fails at its first failing command. Scenarios run in the order of their numbers;
# those after "install" need it. A suite (hack/e2e/suites) is the same, and takes longer.
# Sourced, never run.
set -euo pipefail

# shellcheck source=hack/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
# shellcheck source=hack/e2e/cluster.sh
source "$repo/hack/e2e/cluster.sh"
cd "$repo"

overlay=$e2e/overlays
# Of the volumes and pods of deploy/examples/volume, as in docs/guide/backup.md.
namespace=backup-demo

trap 'echo "failed: ${BASH_COMMAND@Q}, line $LINENO of ${0##*/}" >&2' ERR

step() { printf '%5d s  %s\n' "$SECONDS" "$*"; }

# quietly COMMAND...: prints its output only if it fails.
quietly() {
    local output
    output=$("$@" 2>&1) || {
        printf '%s\n' "$output" >&2
        return 1
    }
}

# eventually COMMAND...: repeats a command until it succeeds; prints its last output if it never does.
eventually() {
    local deadline=$((SECONDS + patience)) output
    until output=$("$@" 2>&1); do
        if ((SECONDS >= deadline)); then
            printf '%s\nno success within %d s: %s\n' "$output" "$patience" "$*" >&2
            return 1
        fi
        sleep 0.5
    done
}

# equal WHAT EXPECTED FOUND
equal() {
    [[ $2 == "$3" ]] || {
        printf '%s: expected\n%s\nfound\n%s\n' "$1" "$2" "$3" >&2
        return 1
    }
}

# refused WORDS COMMAND...: whether the command fails with these words.
refused() {
    local output
    ! output=$("${@:2}" 2>&1) || {
        printf '%s: expected a failure, found\n%s\n' "${*:2}" "$output" >&2
        return 1
    }
    [[ $output == *"$1"* ]] || equal "error of ${*:2}" "… $1 …" "$output"
}

apply() { # apply: manifests from stdin
    quietly kubectl apply --server-side -f -
}

await() { # await CONDITION ARGUMENT...: kubectl wait
    quietly kubectl wait --timeout="${patience}s" --for="$1" "${@:2}"
}

rollout() { # rollout NAMESPACE OBJECT...
    local object
    for object in "${@:2}"; do
        quietly kubectl -n "$1" rollout status --timeout="${patience}s" "$object"
    done
}

in_pod() { # in_pod POD SCRIPT: runs a shell script in a pod of $namespace
    kubectl -n "$namespace" exec "$1" -- sh -euc "$2"
}

# overlay_of NAME BASE [COMPONENT...]: an overlay of a directory of deploy/, with components; prints its directory.
overlay_of() {
    local directory=$overlay/$1 name
    mkdir -p "$directory"
    {
        printf 'apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n'
        printf 'resources: [%s]\n' "$(realpath --relative-to="$directory" "deploy/$2")"
        printf 'components:\n'
        for name in "${@:3}"; do
            printf '  - %s\n' "$(realpath --relative-to="$directory" "deploy/components/$name")"
        done
    } >"$directory/kustomization.yaml"
    printf '%s\n' "$directory"
}

claim() { # claim NAME SIZE [KEY: VALUE...]: a PersistentVolumeClaim with further lines in its spec
    local name=$1 size=$2 line
    shift 2
    {
        printf 'apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: %s, namespace: %s}\nspec:\n' "$name" "$namespace"
        printf '  accessModes: [ReadWriteOncePod]\n  resources: {requests: {storage: %s}}\n' "$size"
        [[ "$*" == *storageClassName* ]] || printf '  storageClassName: csi-loopback\n'
        for line; do printf '  %s\n' "$line"; done
    } | apply
}

# user NAME CLAIM: a pod with the claim's filesystem at /data, or its device at /device.
user() {
    pod_with "$@"
    await condition=Ready -n "$namespace" "pod/$1"
}

# pod_with NAME CLAIM [NODE [COMMAND]]: the same on a node, with a command, without waiting.
pod_with() {
    local mode selector='' command=${4:-[sleep, infinity]} mounts="volumeMounts: [{name: data, mountPath: /data}]"
    [[ -z ${3:-} ]] || selector="nodeSelector: {kubernetes.io/hostname: $3}"
    mode=$(kubectl -n "$namespace" get pvc "$2" -o jsonpath='{.spec.volumeMode}')
    [[ $mode != Block ]] || mounts="volumeDevices: [{name: data, devicePath: /device}]"
    apply <<END
apiVersion: v1
kind: Pod
metadata: {name: $1, namespace: $namespace}
spec:
  $selector
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: csi-loopback:0.1.0
      command: $command
      $mounts
  volumes:
    - name: data
      persistentVolumeClaim: {claimName: $2}
END
}

request_snapshot() { # request_snapshot NAME CLAIM [CLASS]: without waiting
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1, namespace: $namespace}
spec: {volumeSnapshotClassName: ${3:-csi-loopback}, source: {persistentVolumeClaimName: $2}}
END
}

snapshot() { # snapshot NAME CLAIM [CLASS]
    request_snapshot "$@"
    await jsonpath='{.status.readyToUse}=true' -n "$namespace" "volumesnapshot/$1"
}

from_snapshot() { # from_snapshot CLAIM SIZE SNAPSHOT [KEY: VALUE...]
    claim "$1" "$2" "dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: $3}" "${@:4}"
}

# commands_of PAGE SECTION: the commands of a section of a page (blocks "sh"), as printed.
commands_of() {
    awk -v section="## $2" '
        /^## / { here = $0 == section }
        /^ *```$/ { on = 0 }
        here && on { print }
        /^ *```sh$/ { on = 1 }' "$1"
}

# s3_server NAMESPACE: a pod and a Service "s3" with an S3 server that keeps its objects in memory, with a bucket "backups".
s3_server() {
    program_image "$(go_tool gofakes3)" localhost/gofakes3:e2e gofakes3
    load_image "$e2e/images/gofakes3.tar"
    apply <<END
apiVersion: v1
kind: Namespace
metadata: {name: $1}
---
apiVersion: v1
kind: Pod
metadata: {name: s3, namespace: $1, labels: {app: s3}}
spec:
  # It has the image.
  nodeName: node
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
    - name: s3
      image: localhost/gofakes3:e2e
      args: [-backend=memory, -initialbucket=backups, -host=:9000, -quiet]
---
apiVersion: v1
kind: Service
metadata: {name: s3, namespace: $1}
spec: {selector: {app: s3}, ports: [{port: 9000}]}
END
    await condition=Ready -n "$1" pod/s3
}

# client ARGUMENT...: a client command in the pod of hack/e2e/client.yaml, which may use all three APIs.
client() { kubectl -n backup-client exec client -- /csi-loopback "$@"; }

# backup_command ARGUMENT...: a backup command with the rights of hack/e2e/client.yaml, and the claim "backups".
backup_command() { client "$@" --namespace "$namespace" --repository claim:backups --quiet; }

# movers_are_gone: whether no Job, pod or claim of a mover remains.
movers_are_gone() {
    local rest
    rest=$(kubectl -n "$namespace" get jobs,pods,pvc --no-headers) || return
    rest=$(grep csi-loopback-mover <<<"$rest" || true)
    echo "$rest"
    [[ -z $rest ]]
}

# join_extents: joins adjacent extents, "OFFSET LENGTH" a line: responses may split them differently.
join_extents() {
    awk 'NR > 1 && $1 == at + length_ { length_ += $2; next }
        NR > 1 { print at, length_ } { at = $1; length_ = $2 } END { if (NR) print at, length_ }'
}

# extents_by API COMMAND...: the extents that an API returns.
extents_by() {
    local api=$1
    shift
    [[ $api != metadata ]] || set -- "$@" --token-file=/var/run/secrets/snapshot-metadata/token
    client snapshot "$@" --api="$api" --namespace="$namespace" --output=json | jq -r '.extents[] | "\(.offset) \(.length)"' |
        join_extents
}

# extents COMMAND...: the extents, after a check that all three APIs return the same.
extents() {
    local api found first=
    for api in metadata session aggregated; do
        found=$(extents_by "$api" "$@")
        [[ $api == metadata ]] && first=$found
        equal "snapshot $* by $api" "$first" "$found" || return 1
    done
    printf '%s\n' "$first"
}

delete() { # delete ARGUMENT...: kubectl delete, which waits
    quietly kubectl delete --ignore-not-found --timeout="${patience}s" "$@"
}

# discard ARGUMENT...: kubectl delete of what no later step needs, without waiting; "uninstall" waits for all of it.
discard() { quietly kubectl delete --ignore-not-found --wait=false "$@"; }

# volumes_are_gone: whether no PersistentVolume and no content of a snapshot remains.
volumes_are_gone() {
    local rest
    rest=$(kubectl get persistentvolumes,volumesnapshotcontents,volumegroupsnapshotcontents --no-headers) || return
    echo "$rest"
    [[ -z $rest ]]
}

# load_image ARCHIVE: moves an image (hack/oci.sh) into containerd of the node. A script brings what it alone needs.
load_image() {
    quietly on_node ctr --namespace k8s.io images import "$1"
    rm "${1%.tar}".{tar,digest}
}

# has_ended NAMESPACE POD: whether a pod has ended, with or without success.
has_ended() { [[ $(kubectl -n "$1" get pod "$2" -o jsonpath='{.status.phase}') =~ ^(Succeeded|Failed)$ ]]; }

passed=0 failed=0

check() { # check WHAT COMMAND...: runs a test, and counts it in passed or failed
    local what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        step "passed: $what"
    else
        failed=$((failed + 1))
        step "FAILED: $what"
    fi
}

# count WHAT PASSED FAILED SKIPPED: prints the counts of another project's tests, again at the end of the run. Fails if one
# failed or none passed.
count() {
    printf '%s: %d passed, %d failed, %d skipped\n' "$@" | tee -a "$e2e/counts"
    (($2 > 0 && $3 == 0))
}

# restart PART: kills a part of the cluster (hack/e2e/node.sh), and returns when it has been started again.
restart() {
    : >"$e2e/restart/$1"
    while [[ -e $e2e/restart/$1 ]]; do sleep 0.1; done
}

# process_of NAMESPACE POD CONTAINER: the container's first process, as the node sees it.
process_of() {
    local id
    id=$(kubectl -n "$1" get pod "$2" -o json |
        jq -r --arg name "$3" '.status.containerStatuses[] | select(.name == $name) | .containerID | ltrimstr("containerd://")')
    on_node ctr --namespace k8s.io tasks ls | awk -v id="$id" '$1 == id { print $2 }'
}

# kill_container NAMESPACE POD CONTAINER: by SIGKILL; kubelet starts it again.
kill_container() { on_node kill -KILL "$(process_of "$@")"; }

# steady_writer: a pod "steady" that appends a durable line with the next number to /data/log ten times a second.
steady_writer() {
    claim steady 128Mi
    pod_with steady steady "" "[sh, -c, 'i=\$(wc -l </data/log 2>/dev/null || echo 0); while i=\$((i + 1)) && echo \$i >>/data/log && sync /data/log; do sleep 0.1; done']"
    await condition=Ready -n "$namespace" pod/steady
}

# is_steady: whether the pod "steady" still writes, was not restarted, and has lost no line.
is_steady() {
    local before after
    before=$(in_pod steady 'wc -l </data/log')
    sleep 1
    after=$(in_pod steady 'wc -l </data/log')
    ((after > before)) || equal "lines of the steady writer" "more than $before" "$after" || return 1
    # shellcheck disable=SC2016 # for awk
    equal "missing lines" "" "$(in_pod steady 'awk "\$1 != NR { print NR; exit }" /data/log')" || return 1
    equal restarts 0 "$(kubectl -n "$namespace" get pod steady -o jsonpath='{.status.containerStatuses[0].restartCount}')"
}
