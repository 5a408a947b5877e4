#!/usr/bin/env bash
# hack/demo-session.sh: snapshot sessions, on one machine with a real API server. Starts a cluster without nodes (hack/cluster.sh), a
# driver with csi-snapshotter and the sidecar beside it, and the session manager, each as the ServiceAccount and with the rights that
# deploy/ gives it; writes to a volume and takes VolumeSnapshots; lists in sessions, as the ServiceAccount of
# deploy/examples/backup-app-session, which blocks hold data and which changed; shows a request from Pending to Ready, one that
# is refused, one that is revoked and one that expires. Leaves nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN      the binary to show; without it, the one of this tree is built
# Needs root, for loop devices and mounts. The first run builds the parts of Kubernetes, which takes minutes.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"
# shellcheck source=hack/cluster-stage.sh
source "$(dirname "$0")/cluster-stage.sh"

# Where the snapshots are, and what is installed for sessions.
namespace=backup-demo
manager=csi-loopback-session-manager
managers=csi-loopback-sessions
# The sidecar's port.
port=

# What deploy/ has, but for pods, which nobody starts here: they run beside this script.
install() {
    local directory
    for directory in base session-manager examples/backup-app-session; do
        tell kubectl apply --server-side -k "deploy/$directory"
        kubectl apply --server-side -k "$repo/deploy/$directory" >>"$tmp/install.log"
    done
    # Whose snapshots are of a class of its own here, and somebody who may ask for sessions and may not read snapshots.
    kubectl apply -f - >>"$tmp/install.log" <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: loopback}
driver: $driver_name
deletionPolicy: Delete
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: stranger, namespace: $namespace}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: stranger, namespace: $namespace}
rules:
- {apiGroups: [cbt.storage.k8s.io], resources: [snapshotsessionrequests], verbs: [create, get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: stranger, namespace: $namespace}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: stranger}
subjects: [{kind: ServiceAccount, namespace: $namespace, name: stranger}]
END
}

# With the flags of deploy/base. The address is this machine's.
start_sidecar() {
    local http
    port=$(free_port) http=$(free_port)
    kubeconfig_of csi-loopback csi-loopback-metadata
    start sidecar "$driver" --mode sidecar --csi-address "$tmp/csi.sock" --port "$port" --http-endpoint ":$http" \
        --audience "snapshot-metadata.$driver_name" --session-api --manage-service --service-address "localhost:$port" \
        --self-signed --self-signed-secret csi-loopback-metadata-tls --namespace csi-loopback \
        --kubeconfig "$tmp/csi-loopback-metadata.kubeconfig"
    until_so 60 "the sidecar" healthy "$port" "$http"
    until_so 60 "the SnapshotServiceConfiguration" kubectl get snapshotserviceconfiguration "$driver_name"
}

# With the flags of deploy/session-manager. The API server, which is no pod here, calls the webhook by URL.
start_manager() {
    local webhook http patch
    webhook=$(free_port) http=$(free_port)
    patch='[{"op": "replace", "path": "/webhooks/0/clientConfig", "value": {"url":
        "https://localhost:'$webhook'/validate-snapshotsessionrequest"}}]'
    kubectl patch validatingwebhookconfiguration "$manager" --type=json -p "$patch" >>"$tmp/install.log"
    kubeconfig_of "$managers" "$manager"
    start session-manager "$driver" --mode session-manager --port "$webhook" --http-endpoint ":$http" \
        --self-signed --self-signed-secret "$manager-tls" --service-address "localhost:$webhook" \
        --namespace "$managers" --identity demo --kubeconfig "$tmp/$manager.kubeconfig"
    until_so 60 "the session manager" healthy "$webhook" "$http"
    # It publishes whom to trust, and the API server learns of that.
    until_so 60 "the webhook" trusted
}

trusted() { as_application create --dry-run=server -f "$tmp/probe.yaml"; }

# as_application ARGUMENT...: kubectl as the backup application.
as_application() {
    "$tmp/cluster/tools/kubectl" --kubeconfig "$tmp/backup-app.kubeconfig" --cache-dir "$tmp/cache-app" "$@"
}

request() { # request NAME LIFETIME_SECONDS SNAPSHOT: a SnapshotSessionRequest
    cat <<END
apiVersion: cbt.storage.k8s.io/v1alpha2
kind: SnapshotSessionRequest
metadata: {name: $1, namespace: $namespace}
spec: {snapshots: [$3], lifetimeSeconds: $2}
END
}

ask_for_session() { # ask_for_session NAME LIFETIME_SECONDS SNAPSHOT
    request "$@" >"$tmp/$1.yaml"
    sed 's/^/    /' "$tmp/$1.yaml"
    tell kubectl create -f "$1.yaml"
    as_application create -f "$tmp/$1.yaml" | sed 's/^/    /'
}

show_requests() {
    tell kubectl -n "$namespace" get snapshotsessionrequests
    as_application -n "$namespace" get snapshotsessionrequests 2>&1 | sed 's/^/    /'
}

state_is() { # state_is NAME STATE
    [[ $(as_application -n "$namespace" get ssr "$1" -o 'jsonpath={.status.state}') == "$2" ]]
}

is_gone() { [[ -z $(as_application -n "$namespace" get ssr "$1" --ignore-not-found -o name) ]]; }

# token_of NAME: of a session that is ready. Whoever reads it has the session: it is for this script and for nobody's screen.
token_of() { as_application -n "$namespace" get ssr "$1" -o 'jsonpath={.status.sessionToken}'; }

# answer_to TOKEN SNAPSHOT: what the sidecar says to a GetAllocated with this token and no other right, asked with curl: a gRPC
# call is a POST of a message behind five bytes with its length, and its status comes last.
answer_to() {
    local token=$1 snapshot=$2 length line code="" words=""
    printf -v length '\\x%02x' $((${#token} + ${#snapshot} + 4))
    # Fields 1 and 3 of the message, each with its length.
    printf '%b' "\\x00\\x00\\x00\\x00$length" "\\x0a$(printf '\\x%02x' ${#token})$token" \
        "\\x1a$(printf '\\x%02x' ${#snapshot})$snapshot" >"$tmp/question"
    while read -r line; do
        case $line in
            grpc-status:*) code=${line#*: } ;;
            grpc-message:*) words=${line#*: } ;;
        esac
    done < <(curl --silent --max-time 30 --http2 --cacert "$tmp/session-ca.crt" --output "$tmp/answer" --dump-header - \
        --data-binary "@$tmp/question" --header 'content-type: application/grpc' --header 'te: trailers' \
        "https://localhost:$port/snapshotsession.SnapshotMetadata/GetAllocated" | tr -d '\r')
    rm -f "$tmp/question"
    [[ -n $code ]] || die "the sidecar does not answer"
    # Percent-encoded, as gRPC has it.
    printf 'grpc-status %s%b\n' "$code" "${words:+: ${words//%/\\x}}"
}

# expect_answer TOKEN SNAPSHOT STATUS: tells the answer, and fails for another one. The sidecar hears of the end of a session
# through a watch, a moment later.
expect_answer() {
    local answer
    for _ in {1..20}; do
        answer=$(answer_to "$1" "$2")
        [[ $answer != "grpc-status $3"* ]] || break
        sleep 0.1
    done
    printf '    a call with the token alone: %s\n' "$answer"
    [[ $answer == "grpc-status $3"* ]] || die "grpc-status $3 was expected"
}

begin_demo "${storage_commands[@]}" setsid jq curl

say "starting an API server, etcd and the snapshot-controller, in \$tmp ($tmp)"
start_cluster
install

say "starting the driver, csi-snapshotter, the sidecar and the session manager"
start_driver
start_snapshotter
snapshotter_pid=$started
start_sidecar
kubeconfig_of backup-app-session backup-app
request probe 60 monday >"$tmp/probe.yaml"
start_manager
tell kubectl get snapshotserviceconfigurations
kubectl get snapshotserviceconfigurations | sed 's/^/    /'

say "a volume with a PersistentVolumeClaim, published as a block device"
make_volume

say "writing, and a VolumeSnapshot: monday"
write 0 8192
write 64 1024
take_snapshot monday

say "changing, and another: tuesday"
write 4 64
write 300 2048
take_snapshot tuesday

say "from here on as ServiceAccount backup-app-session/backup-app, which may ask for sessions in $namespace"
export KUBECONFIG=$tmp/backup-app.kubeconfig

say "a full backup, in a session: made, waited for, and ended by the command"
show snapshot allocated monday --api session --namespace "$namespace"

say "an incremental one"
show snapshot delta monday tuesday --api session --namespace "$namespace"

say "a session by hand, for a snapshot that is not ready yet (csi-snapshotter stands still): Pending"
kill -STOP -- "-$snapshotter_pid"
begin_snapshot wednesday
ask_for_session by-hand 600 wednesday
until_so 30 "a request that is Pending" state_is by-hand Pending
show_requests
say "the snapshot becomes ready, and the session: Ready"
kill -CONT -- "-$snapshotter_pid"
until_so 60 "a session that is Ready" state_is by-hand Ready
show_requests
show snapshot allocated wednesday --api session --session by-hand --namespace "$namespace"

say "who has the token has the session, until its request is deleted"
as_application -n "$namespace" get ssr by-hand -o 'jsonpath={.status.caCert}' | base64 -d >"$tmp/session-ca.crt"
token=$(token_of by-hand)
expect_answer "$token" wednesday 0
tell kubectl -n "$namespace" delete ssr by-hand
as_application -n "$namespace" delete ssr by-hand | sed 's/^/    /'
expect_answer "$token" wednesday 16

say "one that lasts for ten seconds"
ask_for_session short 10 monday
until_so 10 "a session that is Ready" state_is short Ready
show_requests
token=$(token_of short)
expect_answer "$token" monday 0
until_so 30 "the end of the session" is_gone short
show_requests
expect_answer "$token" monday 16

say "a ServiceAccount that may ask for sessions and may not read these snapshots is refused"
kubeconfig_of "$namespace" stranger
if show snapshot allocated monday --api session --namespace "$namespace" --kubeconfig "$tmp/stranger.kubeconfig"; then
    die "the stranger was not refused"
fi

say "is nothing left of the sessions? As administrator"
unset KUBECONFIG
tell kubectl get ssr,ssd --all-namespaces
left=$(kubectl get ssr,ssd --all-namespaces -o name)
[[ -z $left ]] || die "there are: $left"
kubectl get ssr,ssd --all-namespaces 2>&1 | sed 's/^/    /'

say "taking everything down"
take_down run
end_demo
