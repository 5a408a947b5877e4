# shellcheck shell=bash disable=SC2154
# Scene: the same in a snapshot session: requested, used, revoked, expired, rejected

example=$repo/deploy/examples/backup-app-session

create_session() { # create_session NAME LIFETIME_SECONDS SNAPSHOT
    sed "/^ *#/d; s/generateName: .*/name: $1/; s/Seconds: .*/Seconds: $2/; s/snapshots: .*/snapshots: [$3]/" \
        "$example/request.yaml" | tee "$1.yaml" | indent
    shell kubectl create -f "$1.yaml"
}

await_state() { # await_state NAME STATE
    wait_for "ssr/$1" jsonpath='{.status.state}'="$2"
    shell kubectl get snapshotsessionrequests
}

# get_allocated SNAPSHOT STATUS: calls GetAllocated of the sidecar with only the session token, and
# succeeds if the gRPC status is STATUS. A gRPC request is a POST of a message after five bytes with
# its length; the status is in the trailers. Fields 1 and 3 are token and snapshot.
get_allocated() {
    local message
    printf -v message '\\x0a\\x%02x%s\\x1a\\x%02x%s' "${#token}" "$token" "${#1}" "$1"
    printf -v message '\\x00\\x00\\x00\\x00\\x%02x%s' $((${#token} + ${#1} + 4)) "$message"
    answer=$(printf '%b' "$message" | curl --silent --max-time 30 --http2 --cacert session-ca.crt --output answer \
        --dump-header - --data-binary @- --header 'content-type: application/grpc' --header 'te: trailers' \
        "https://localhost:$sidecar/snapshotsession.SnapshotMetadata/GetAllocated" | grep '^grpc-' | tr -d '\r')
    [[ $answer == *"grpc-status: $2"* ]]
}

expect() { # expect SNAPSHOT STATUS: waits, because the sidecar gets the end of a session by a watch, a moment later
    await "grpc-status $2 with only the token" get_allocated "$@"
    printf '%s, with only the token: %b\n' "$1" "${answer//%/\\x}" | indent
}

begin
start_cluster
apply base session-manager examples/backup-app-session
kubeconfig_of backup-app-session backup-app
make_stranger snapshotsessionrequests.cbt.storage.k8s.io
say "starting the driver, csi-snapshotter, the sidecar and the session manager"
start_storage
sidecar=$port
webhook=$(free_port)
call_by_url "$webhook"
start_role csi-loopback-sessions deployment/csi-loopback-session-manager session-manager "--port=$webhook"
await "trust in the webhook" as backup-app kubectl create --dry-run=server -f "$example/request.yaml"
shell kubectl get snapshotserviceconfigurations
take_snapshots
say "switching to the ServiceAccount backup-app, which may request sessions in $namespace"
act_as backup-app
say "full and incremental backup; the command requests, awaits and deletes a session for each"
show snapshot allocated monday --api session --namespace "$namespace"
show snapshot delta monday tuesday --api session --namespace "$namespace"
say "requesting a session for a snapshot that is not ready (csi-snapshotter is stopped): Pending"
kill -STOP -- "-${pid_of[csi-snapshotter]}"
request_snapshot wednesday
create_session by-hand 600 wednesday
await_state by-hand Pending
say "continuing csi-snapshotter: snapshot and session become ready"
kill -CONT -- "-${pid_of[csi-snapshotter]}"
await_state by-hand Ready
show snapshot allocated wednesday --api session --session by-hand --namespace "$namespace"
say "the token is valid until the request is deleted"
kubectl get ssr by-hand -o 'jsonpath={.status.caCert}' | base64 -d >session-ca.crt
token=$(kubectl get ssr by-hand -o 'jsonpath={.status.sessionToken}')
expect wednesday 0
shell kubectl delete ssr by-hand
expect wednesday 16
say "a session of thirty seconds expires"
create_session short 30 monday
await_state short Ready
token=$(kubectl get ssr short -o 'jsonpath={.status.sessionToken}')
expect monday 0
wait_for ssr/short delete
expect monday 16
say "the API server rejects a ServiceAccount that may request sessions but not read these snapshots"
rejected volumesnapshots as stranger show snapshot allocated monday --api session --namespace "$namespace"
say "no object of a session remains"
act_as administrator
shell kubectl get ssr,ssd --all-namespaces
[[ -z $(kubectl get ssr,ssd --all-namespaces -o name) ]] || die "objects of sessions remain"
remove_volume
