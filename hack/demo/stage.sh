# shellcheck shell=bash disable=SC2034,SC2154
# Shared by the scenes of hack/demo.sh: printing, starting and waiting, a driver with a volume, a cluster with
# snapshots of that volume, and the clean-up.
# Sourced after lib.sh, never run. A scene begins with `begin`.

driver_name=loopback.csi.local
volume=demo
# Namespace of claims, snapshots and pods.
namespace=backup-demo
# Seconds that await waits.
patience=120

tmp=
driver=
# Flags of the driver, besides those that start_driver gives.
driver_flags=()
# The command that runs in the foreground.
child_pid=
# Names of the programs started, in order, and the process of each that has not been stopped.
started=()
declare -A pid_of=()

bold='' dim='' plain=''
if [[ -t 1 ]]; then
    bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi
# For what must be seen while a function's output is redirected.
exec {screen}>&1 {errors}>&2

# --- Printing and running -------------------------------------------------------------------------

say() { printf '%s==> %s%s\n' "$bold" "$*" "$plain"; }

tell() { printf '%s    $ %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain" >&"$screen"; }

indent() { sed "s|$tmp|\$tmp|g; s/^/    /"; }

# run COMMAND...: in the background, so that a signal to this script is handled while it runs, and in a session of its
# own, so that an interrupt from the terminal reaches this script alone, which stops everything in order.
run() {
    local status=0
    setsid "$@" &
    child_pid=$!
    wait "$child_pid" || status=$?
    child_pid=
    return "$status"
}

# show ARGUMENT...: prints and runs a command of the binary.
show() {
    tell csi-loopback "$@"
    run "$driver" "$@"
}

# shell COMMAND...: prints and runs any other command.
shell() {
    tell "$@"
    "$@" 2>&1 | indent
}

# refused WORDS COMMAND...: runs a command that must fail with these words.
refused() {
    local words=$1
    shift
    if "$@" >"$tmp/refusal" 2>&1; then
        die "not refused: $(<"$tmp/refusal")"
    fi
    indent <"$tmp/refusal"
    grep -qF -- "$words" "$tmp/refusal" || die "refused, but not with: $words"
}

# await WHAT COMMAND...: waits until the command succeeds.
await() {
    local what=$1 name deadline=$((SECONDS + patience))
    shift
    until "$@" >/dev/null 2>&1; do
        for name in "${!pid_of[@]}"; do
            kill -0 "${pid_of[$name]}" 2>/dev/null || die "$name has ended"
        done
        ((SECONDS < deadline)) || die "$what: not within $patience s"
        sleep 0.1
    done
}

# start NAME COMMAND...: in the background, in a session of its own, with its output in $tmp/NAME.log.
start() {
    local name=$1
    shift
    setsid "$@" >"$tmp/$name.log" 2>&1 </dev/null {screen}>&- {errors}>&- &
    pid_of[$name]=$!
    started+=("$name")
}

stop() { # stop PID SECONDS: sends SIGTERM to the process and those that it started, and later SIGKILL
    local deadline=$((SECONDS + $2))
    # Until it has a session of its own, it has no group of its own.
    kill -TERM -- "-$1" 2>/dev/null || kill -TERM "$1" 2>/dev/null || return 0
    # A process that is stopped handles it only when it continues.
    kill -CONT -- "-$1" 2>/dev/null || true
    while kill -0 "$1" 2>/dev/null; do
        if ((SECONDS >= deadline)); then
            kill -KILL "$1" 2>/dev/null || true
            break
        fi
        sleep 0.1
    done
    wait "$1" 2>/dev/null || true
}

stop_started() { # stop_started NAME
    stop "${pid_of[$1]}" 30
    unset "pid_of[$1]"
}

stop_all() { # the last one first
    local index name
    for ((index = ${#started[@]} - 1; index >= 0; index--)); do
        name=${started[index]}
        [[ -z ${pid_of[$name]:-} ]] || stop_started "$name"
    done
}

# --- Begin and end --------------------------------------------------------------------------------

# begin COMMAND...: installs what is missing and makes $tmp. Everything that is started from here on keeps its files
# below it, and is recognised by it.
begin() {
    is_root || die "needs root, for loop devices and mounts: sudo $0"
    install_missing "${storage_commands[@]}" setsid jq "$@" || die "cannot install what is missing"
    find_driver
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-loopback-demo.XXXXXX")
    export TMPDIR=$tmp
    export CSI_ENDPOINT=unix://$tmp/csi.sock
    cd "$tmp" || exit
}

find_driver() {
    driver=${CSI_LOOPBACK_BIN:-}
    if [[ -z $driver ]]; then
        command -v cargo >/dev/null || die "needs Rust: no cargo in PATH"
        install_missing gcc || die "needs a C compiler"
        say "building csi-loopback"
        run env --chdir="$repo" cargo build --locked || die "the build failed"
        driver=$(cd "$repo" && realpath "${CARGO_TARGET_DIR:-target}")/debug/csi-loopback
    fi
    driver=$(realpath "$driver")
    [[ -x $driver ]] || die "no binary at $driver"
}

# in_use: processes, mounts and loop devices of this run, a line each, that remain after the kernel had time to release
# them: a loop device outlives its last user for a moment.
in_use() {
    local left processes
    for _ in {1..50}; do
        processes=$(processes_of "$tmp")
        left=$(
            [[ -z $processes ]] || printf 'process %s\n' "${processes//$'\n'/$'\nprocess '}"
            mounts_below "$tmp" | sed 's/^/mount /'
            loops_of "$tmp" | sed 's/^/loop device /'
        )
        [[ -n $left ]] || return 0
        sleep 0.1
    done
    printf '%s\n' "$left"
}

# finish: ends a scene that has taken down what it made, and fails for what the driver has left.
finish() {
    local left
    stop_all
    left=$(in_use)
    [[ -z $left ]] || die "still in use: $left"
    clear_directory "$tmp"
    [[ ! -e $tmp ]] || die "still there: $tmp"
    tmp=
    say "done: no mount, loop device, process or file is left"
}

print_logs() {
    local name
    for name in "${!pid_of[@]}"; do
        [[ -s $tmp/$name.log ]] || continue
        echo "    last lines of the log of $name:"
        tail -n 20 "$tmp/$name.log" | sed 's/^/    /'
    done
}

# before_clean_up: what a scene must do while its programs still run.
before_clean_up() { :; }

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    local status=$1 left pid
    # A second interrupt must not stop the clean-up of the first.
    trap '' INT TERM HUP PIPE
    trap - EXIT
    set +e
    exec 1>&"$screen" 2>&"$errors"
    # A verification that is running removes its own volumes.
    [[ -z $child_pid ]] || stop "$child_pid" 70
    if [[ -n $tmp ]]; then
        say "interrupted or failed: cleaning up"
        ((status == 0 || status >= 128)) || print_logs
        before_clean_up
        stop_all
        # Started in the moment of the interrupt.
        while read -r pid _; do
            stop "$pid" 5
        done < <(processes_of "$tmp")
        clear_directory "$tmp"
        unset TMPDIR
        left=$(in_use)
        [[ ! -e $tmp ]] || left+=$'\n'"directory $tmp"
    fi
    if [[ -n ${left:-} ]]; then
        printf 'still there:\n%s\n' "$left" >&2
    elif [[ -n $tmp || $status -ge 128 ]]; then
        say "cleaned up: no mount, loop device, process or file is left"
    fi
    exit "$status"
}

# Signals call the clean-up themselves: an interrupt that also made a command fail, and so has begun the trap of the
# exit already, would end that trap with an `exit` before its first command.
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM
trap 'cleanup 129' HUP
trap 'cleanup 141' PIPE

# --- Driver and volume ----------------------------------------------------------------------------

start_driver() {
    start driver "$driver" --mode driver --endpoint "$CSI_ENDPOINT" --data-dir "$tmp/data" --pool auto \
        "${driver_flags[@]}"
    await "the driver" "$driver" volume list --timeout 5s
}

make_volume() { # make_volume SIZE MODE...: creates, stages and publishes it
    local size=$1
    shift
    show volume create "$volume" --size "$size" "$@"
    publish_volume "$@"
}

publish_volume() { # publish_volume MODE...: stages and publishes it at $tmp/target
    show volume stage "$volume" --staging "$tmp/staging" "$@"
    show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" "$@"
}

# remove_volume: through the driver, with its snapshots.
remove_volume() {
    local snapshot
    say "taking everything down"
    run "$driver" volume unpublish "$volume" --target "$tmp/target"
    run "$driver" volume unstage "$volume" --staging "$tmp/staging"
    for snapshot in $("$driver" snapshot list --output json | jq -r '.[].id'); do
        run "$driver" snapshot delete "$snapshot"
    done
    run "$driver" volume delete "$volume"
}

# start_crust_ops DIR [PREFIX...]: for a runtime whose configuration is DIR/oci-runtime.yaml; in the namespaces that
# PREFIX enters.
start_crust_ops() {
    local dir=$1
    shift
    start crust-ops "$@" "$driver" --mode runtime-ops --endpoint "unix://$tmp/crust.sock" --crust-dir "$dir/crust" \
        --cli-env "CSI_LOOPBACK_RUNC_CONFIG=$dir/oci-runtime.yaml" --collect-every 1s
    await crust_ops test -S "$tmp/crust.sock"
    deferring=(--enable-defer-fs-ops --crust-endpoint "unix://$tmp/crust.sock")
}

# --- Cluster --------------------------------------------------------------------------------------

start_cluster() {
    say "starting an API server, etcd and the snapshot-controller in \$tmp ($tmp)"
    # Here, so that the build of the first run is seen.
    kubernetes_tools >/dev/null || die "needs the Kubernetes tools"
    start cluster "$repo/hack/cluster.sh" "$tmp/cluster"
    await "the API server" test -e "$tmp/cluster/ready"
    PATH=$tmp/cluster/tools:$PATH
    ln -s cluster/kubeconfig "$tmp/administrator.kubeconfig"
    act_as administrator
}

# act_as ACCOUNT: from here on, with $tmp/ACCOUNT.kubeconfig.
act_as() { export KUBECONFIG=$tmp/$1.kubeconfig KUBECACHEDIR=$tmp/$1.cache; }

as() { # as ACCOUNT COMMAND...
    KUBECONFIG=$tmp/$1.kubeconfig KUBECACHEDIR=$tmp/$1.cache "${@:2}"
}

# kubeconfig_of NAMESPACE NAME: writes $tmp/NAME.kubeconfig, for a ServiceAccount.
kubeconfig_of() {
    local token
    token=$(as administrator kubectl -n "$1" create token "$2" --duration=1h)
    sed "s/client-certificate-data:.*/token: $token/; /client-key-data:/d" "$tmp/cluster/kubeconfig" \
        >"$tmp/$2.kubeconfig"
}

# apply DIRECTORY...: of deploy/. Nothing starts its pods here: start_role does what they would do.
apply() {
    local directory
    for directory; do
        tell kubectl apply --server-side -k "deploy/$directory"
        kubectl apply --server-side -k "$repo/deploy/$directory" >>"$tmp/apply.log"
    done
}

# make_account NAME RESOURCE: a ServiceAccount that may create and get RESOURCE in $namespace, and nothing else.
make_account() {
    {
        kubectl -n "$namespace" create serviceaccount "$1"
        kubectl -n "$namespace" create role "$1" --verb=create,get --resource="$2"
        kubectl -n "$namespace" create rolebinding "$1" --role="$1" --serviceaccount="$namespace:$1"
    } >>"$tmp/apply.log"
    kubeconfig_of "$namespace" "$1"
}

# free_port: below those that the kernel assigns by itself.
free_port() {
    local port
    while :; do
        port=$((20000 + SRANDOM % 12000))
        (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    done
    printf '%s\n' "$port"
}

# free_ports: sets port and http, for the next start_role.
free_ports() { port=$(free_port) http=$(free_port); }

# start_role NAMESPACE WORKLOAD CONTAINER FLAG...: what that container of deploy/ runs, with its flags and the rights
# of its ServiceAccount. Its ports, sockets and addresses are replaced by this machine's, and by FLAG=VALUE.
start_role() {
    local namespace=$1 container=$3 workload account flag args
    workload=$(kubectl -n "$1" get "$2" -o json)
    shift 3
    account=$(jq -r .spec.template.spec.serviceAccountName <<<"$workload")
    kubeconfig_of "$namespace" "$account"
    mapfile -t args < <(jq -r --arg name "$container" \
        '.spec.template.spec.containers[] | select(.name == $name) | .args[]' <<<"$workload")
    for flag in "--port=$port" "--http-endpoint=127.0.0.1:$http" "--csi-address=$tmp/csi.sock" \
        "--service-address=localhost:$port" "$@"; do
        args=("${args[@]/#"${flag%%=*}="*/"$flag"}")
    done
    start "$container" env POD_NAMESPACE="$namespace" POD_NAME=demo POD_IP=127.0.0.1 NODE_NAME=node \
        POD_SERVICE_ACCOUNT="$account" "$driver" "${args[@]}" --kubeconfig "$tmp/$account.kubeconfig"
}

# start_server ARGUMENT...: a role that serves a port besides its health.
start_server() {
    start_role "$@"
    await "$3" healthy
}

healthy() {
    (: <"/dev/tcp/127.0.0.1/$port") && curl --silent --fail "http://127.0.0.1:$http/health"
}

# start_sidecar FLAG...: the sidecar of deploy/base.
start_sidecar() {
    free_ports
    start_server csi-loopback statefulset/csi-loopback metadata "$@"
    await "the SnapshotMetadataService" kubectl get snapshotmetadataservice "$driver_name"
}

start_snapshotter() {
    start csi-snapshotter csi-snapshotter -kubeconfig "$KUBECONFIG" -csi-address "$tmp/csi.sock" \
        -retry-interval-start=200ms -kube-api-qps=100 -kube-api-burst=200
}

# call_by_url NAME: has the API server, which is no pod here, call these webhooks at $port.
call_by_url() {
    local kind
    for kind in mutatingwebhookconfiguration validatingwebhookconfiguration; do
        kubectl get "$kind" "$1" >/dev/null 2>&1 || continue
        kubectl get "$kind" "$1" -o json | jq --arg server "https://localhost:$port" \
            '.webhooks[].clientConfig |= {url: ($server + .service.path)}' | kubectl replace -f - >>"$tmp/apply.log"
    done
}

# make_claim SIZE ACCESS_MODE VOLUME_MODE: $volume in Kubernetes. No controller binds claims here.
make_claim() {
    local handle uid common="accessModes: [$2], volumeMode: $3, storageClassName: ''"
    handle=$("$driver" volume list --output json | jq -r '.[0].id')
    kubectl -n "$namespace" apply -f - >>"$tmp/apply.log" <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {$common, volumeName: pv-data, resources: {requests: {storage: $1}}}
END
    uid=$(kubectl -n "$namespace" get pvc data -o 'jsonpath={.metadata.uid}')
    kubectl apply -f - >>"$tmp/apply.log" <<END
apiVersion: v1
kind: PersistentVolume
metadata: {name: pv-data}
spec:
  {$common, persistentVolumeReclaimPolicy: Retain, capacity: {storage: $1},
   csi: {driver: $driver_name, volumeHandle: $handle},
   claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: $namespace, name: data, uid: $uid}}
END
    kubectl -n "$namespace" patch pvc data --subresource=status --type=merge \
        -p '{"status": {"phase": "Bound", "capacity": {"storage": "'"$1"'"}}}' >>"$tmp/apply.log"
}

write() { # write MIB_OFFSET KIB: random data
    dd if=/dev/urandom of="$tmp/target" bs=1K seek=$(($1 << 10)) count="$2" conv=notrunc,fsync status=none
    printf '    %5d KiB at %d MiB written\n' "$2" "$1"
}

request_snapshot() { # request_snapshot NAME: a VolumeSnapshot of the claim
    cat >"$tmp/snapshot-$1.yaml" <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1, namespace: $namespace}
spec: {source: {persistentVolumeClaimName: data}, volumeSnapshotClassName: csi-loopback}
END
    as administrator shell kubectl apply -f "snapshot-$1.yaml"
}

take_snapshot() { # take_snapshot NAME
    request_snapshot "$1"
    run kubectl -n "$namespace" wait --timeout="${patience}s" --for=jsonpath='{.status.readyToUse}'=true \
        "volumesnapshot/$1" >>"$tmp/apply.log"
}

# The KiB that differ between the two snapshots of take_snapshots.
changed=$((64 + 2048 + 512))

# take_snapshots: makes a volume with a claim, and its VolumeSnapshots monday and tuesday.
take_snapshots() {
    say "creating a volume with a PersistentVolumeClaim, published as a block device"
    make_volume 1Gi --block
    make_claim 1Gi ReadWriteOnce Block
    say "writing, then taking the VolumeSnapshot monday"
    write 0 8192
    write 64 1024
    take_snapshot monday
    say "changing, then taking the VolumeSnapshot tuesday"
    write 4 64
    write 300 2048
    blkdiscard --offset $((64 << 20)) --length $((512 << 10)) "$tmp/target"
    printf '    %5d KiB at %d MiB discarded\n' 512 64
    take_snapshot tuesday
}

handle_of() { # handle_of NAME: the CSI handle of a VolumeSnapshot
    local content
    content=$(kubectl -n "$namespace" get volumesnapshot "$1" -o 'jsonpath={.status.boundVolumeSnapshotContentName}')
    kubectl get volumesnapshotcontent "$content" -o 'jsonpath={.status.snapshotHandle}'
}
