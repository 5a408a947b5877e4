# shellcheck shell=bash disable=SC2034,SC2154
# Shared by the scenes of hack/demo.sh: printing, starting and waiting, the clean-up, a driver with a volume, a cluster
# with snapshots of that volume. Sourced after lib.sh, never run. A scene begins with `begin`.

driver_name=loopback.csi.local
volume=demo
# Namespace of claims, snapshots and pods.
namespace=backup-demo
# Flags of the driver, besides those that start_driver gives.
driver_flags=()
# Seconds to wait for anything.
patience=120

tmp=
# Names of the programs started, the last one first, and the process of each that runs.
started=()
declare -A pid_of=()
outcome="cleaned up"
before_clean_up() { :; } # what a scene must do while its programs still run
bold='' dim='' plain=''
[[ ! -t 1 ]] || bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
# For what must be seen while a function's output is redirected.
exec {screen}>&1 {errors}>&2

say() { printf '%s==> %s%s\n' "$bold" "$*" "$plain"; }
tell() { printf '%s    $ %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain" >&"$screen"; }
indent() { sed "s|$tmp|\$tmp|g; s/^/    /"; }
quietly() { "$@" >>"$tmp/quiet.log"; }
wait_for() { quietly run kubectl wait --timeout="${patience}s" "$1" --for="$2"; } # wait_for OBJECT CONDITION

# run COMMAND...: in the background, so that a signal to this script is handled while it runs, and in a session of its
# own, so that an interrupt from the terminal reaches this script alone, which stops everything in order.
run() {
    local status=0
    setsid "$@" &
    pid_of[command]=$!
    wait "$!" || status=$?
    unset 'pid_of[command]'
    return "$status"
}

show() { # show ARGUMENT...: prints and runs a command of the binary
    tell csi-loopback "$@"
    run "$driver" "$@"
}
shell() { # shell COMMAND...: prints and runs any other command
    tell "$@"
    "$@" 2>&1 | indent
}

refused() { # refused WORDS COMMAND...: runs a command that must fail with these words
    ! "${@:2}" >"$tmp/refusal" 2>&1 || die "not refused: $(<"$tmp/refusal")"
    indent <"$tmp/refusal"
    grep -qF -- "$1" "$tmp/refusal" || die "refused, but not with: $1"
}

same() { # same WHAT ONE OTHER
    [[ -n $2 && $2 == "$3" ]] || die "$1: differs: $2 and $3"
    printf '    %s: the same %d extents\n' "$1" "$(wc -l <<<"$2")"
}

await() { # await WHAT COMMAND...: until the command succeeds
    local name deadline=$((SECONDS + patience))
    until "${@:2}" >/dev/null 2>&1; do
        for name in "${!pid_of[@]}"; do
            kill -0 "${pid_of[$name]}" 2>/dev/null || die "$name has ended"
        done
        ((SECONDS < deadline)) || die "$1: not within $patience s"
        sleep 0.1
    done
}

start() { # start NAME COMMAND...: in the background, in a session of its own, with its output in $tmp/NAME.log
    setsid "${@:2}" >"$tmp/$1.log" 2>&1 </dev/null {screen}>&- {errors}>&- &
    pid_of[$1]=$!
    started=("$1" "${started[@]}")
}

stop() { # stop NAME...: with SIGTERM to each and its group; a verification that is running removes its own volumes
    local name pid
    for name; do
        pid=${pid_of[$name]:-}
        [[ -n $pid ]] || continue
        # Until it has a session of its own, it has no group of its own.
        kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" 2>/dev/null || true
        # A process that is stopped handles it only when it continues.
        kill -CONT -- "-$pid" 2>/dev/null || true
        for _ in {1..700}; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
        unset "pid_of[$name]"
    done
}

# begin COMMAND...: installs what is missing, finds or builds the binary, and makes $tmp. Everything that is started
# from here on keeps its files below it, and is recognised by it.
begin() {
    is_root || die "needs root, for loop devices and mounts: sudo $0"
    install_missing "${storage_commands[@]}" setsid jq curl "$@" || die "cannot install what is missing"
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
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-loopback-demo.XXXXXX")
    export TMPDIR=$tmp CSI_ENDPOINT=unix://$tmp/csi.sock
    cd "$tmp" || exit
}

# in_use: processes, mounts and loop devices of this run that remain after the kernel had time to release them: a loop
# device outlives its last user for a moment.
in_use() {
    local found
    for _ in {1..50}; do
        found=$(
            processes_of "$tmp"
            mounts_below "$tmp"
            loops_of "$tmp"
        )
        [[ -n $found ]] || return 0
        sleep 0.1
    done
    printf '%s\n' "$found"
}

cleanup() { # cleanup STATUS: undoes what was done so far and exits with that
    local status=$1 found='' pid
    # A second interrupt must not stop the clean-up of the first.
    trap '' INT TERM HUP PIPE
    trap - EXIT
    set +e
    exec 1>&"$screen" 2>&"$errors"
    stop command
    if [[ -n $tmp ]]; then
        [[ $outcome == "done" ]] || say "interrupted or failed: cleaning up"
        before_clean_up
        stop "${started[@]}"
        # What the interrupt met before its process was noted.
        while read -r pid _; do
            pid_of[$pid]=$pid
            stop "$pid"
        done < <(processes_of "$tmp")
        ((status == 0 || status >= 128)) || tail -n 20 "$tmp"/*.log 2>/dev/null
        # A scene that came to its end has taken down everything through the driver.
        [[ $outcome != "done" ]] || found=$(in_use)
        clear_directory "$tmp"
        unset TMPDIR
        found+=$(in_use && find "$tmp" -maxdepth 1 2>/dev/null)
    fi
    if [[ -n $found ]]; then
        printf 'still there:\n%s\n' "$found" >&2
        ((status != 0)) || status=1
    elif [[ -n $tmp || $status -ge 128 ]]; then
        say "$outcome: no mount, loop device, process or file is left"
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

start_driver() {
    start driver "$driver" --mode driver --endpoint "$CSI_ENDPOINT" --data-dir "$tmp/data" --pool auto --pool-sparse "${driver_flags[@]}"
    await "the driver" "$driver" volume list --timeout 5s
}

publish_volume() { # publish_volume MODE...: stages and publishes it at $tmp/target
    show volume stage "$volume" --staging "$tmp/staging" "$@"
    show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" "$@"
}

remove_volume() { # through the driver, with its snapshots
    local snapshot
    say "taking everything down"
    run "$driver" volume unpublish "$volume" --target "$tmp/target" --if-published
    run "$driver" volume unstage "$volume" --staging "$tmp/staging" --if-staged
    for snapshot in $("$driver" snapshot list --output json | jq -r '.[].id'); do
        run "$driver" snapshot delete "$snapshot"
    done
    run "$driver" volume delete "$volume"
}

extents() { # extents ARGUMENT...: what a command of `snapshot` lists, one JSON array a line
    "$driver" snapshot "$@" --output json | jq -c '.extents[] | [.offset, .length]'
}

# start_crust_ops DIR [PREFIX...]: for a runtime whose configuration is DIR/oci-runtime.yaml; in the namespaces that
# PREFIX enters. Sets driver_flags.
start_crust_ops() {
    start crust-ops "${@:2}" "$driver" --mode runtime-ops --endpoint "unix://$tmp/crust.sock" --crust-dir "$1/crust" \
        --cli-env "CSI_LOOPBACK_RUNC_CONFIG=$1/oci-runtime.yaml"
    await crust_ops test -S "$tmp/crust.sock"
    driver_flags=(--enable-defer-fs-ops --crust-endpoint "unix://$tmp/crust.sock")
}

start_cluster() {
    say "starting an API server, etcd and the snapshot-controller in \$tmp ($tmp)"
    # Here, so that the build of the first run is seen.
    kubernetes_tools >/dev/null || die "needs the Kubernetes tools"
    start cluster "$repo/hack/cluster.sh" "$tmp/cluster"
    await "the API server" test -e "$tmp/cluster/ready"
    PATH=$tmp/cluster/tools:$PATH
    cp cluster/kubeconfig administrator.kubeconfig
    act_as administrator
    kubectl config set-context --current --namespace="$namespace" >/dev/null
}

act_as() { export KUBECONFIG=$tmp/$1.kubeconfig KUBECACHEDIR=$tmp/$1.cache; } # act_as ACCOUNT: from here on
as() { KUBECONFIG=$tmp/$1.kubeconfig KUBECACHEDIR=$tmp/$1.cache "${@:2}"; } # as ACCOUNT COMMAND...

kubeconfig_of() { # kubeconfig_of NAMESPACE NAME: writes $tmp/NAME.kubeconfig, for a ServiceAccount
    local token
    token=$(kubectl -n "$1" create token "$2" --duration=1h)
    sed "s/client-certificate-data:.*/token: $token/; /client-key-data:/d" administrator.kubeconfig >"$2.kubeconfig"
}

# apply DIRECTORY...: of deploy/. Nothing starts its pods here: start_role does what they would do.
apply() {
    local directory
    for directory; do
        tell kubectl apply --server-side -k "deploy/$directory"
        quietly kubectl apply --server-side -k "$repo/deploy/$directory"
    done
}

make_stranger() { # make_stranger RESOURCE: a ServiceAccount that may create RESOURCE and read no snapshots
    quietly kubectl create serviceaccount stranger
    quietly kubectl create role stranger --verb=create,get --resource="$1"
    quietly kubectl create rolebinding stranger --role=stranger --serviceaccount="$namespace:stranger"
    kubeconfig_of "$namespace" stranger
}

free_port() { # below those that the kernel assigns by itself
    local port
    until port=$((20000 + SRANDOM % 12000)) && ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
    printf '%s\n' "$port"
}

# start_role NAMESPACE WORKLOAD CONTAINER FLAG...: what that container of deploy/ runs, with its flags and the rights
# of its ServiceAccount. Ports, sockets and addresses are replaced by this machine's, and by FLAG=VALUE. Sets port and http.
start_role() {
    local workload account flag args
    port=$(free_port) http=$(free_port)
    workload=$(kubectl -n "$1" get "$2" -o json)
    account=$(jq -r .spec.template.spec.serviceAccountName <<<"$workload")
    kubeconfig_of "$1" "$account"
    mapfile -t args < <(jq -r '.spec.template.spec.containers[] | select(.name == "'"$3"'") | .args[]' <<<"$workload")
    for flag in "--port=$port" "--http-endpoint=127.0.0.1:$http" "--csi-address=$tmp/csi.sock" \
        "--service-address=localhost:$port" "${@:4}"; do
        args=("${args[@]/#"${flag%%=*}="*/"$flag"}")
    done
    start "$3" env POD_NAMESPACE="$1" POD_NAME=demo NODE_NAME=node POD_SERVICE_ACCOUNT="$account" \
        "$driver" "${args[@]}" --kubeconfig "$tmp/$account.kubeconfig"
    await "$3" is_healthy
}
is_healthy() { curl --silent --fail "http://127.0.0.1:$http/health" || curl --silent --fail "http://127.0.0.1:$http/healthz"; }

# call_by_url PORT: has the API server, which is no pod here, call all webhooks there.
call_by_url() {
    kubectl get mutatingwebhookconfigurations,validatingwebhookconfigurations -o json |
        jq '.items[].webhooks[].clientConfig |= {url: ("https://localhost:'"$1"'" + .service.path)}' |
        quietly kubectl replace -f -
}

start_storage() { # start_storage FLAG...: the driver, csi-snapshotter, and the sidecar of deploy/base with these flags
    start_driver
    start csi-snapshotter csi-snapshotter -kubeconfig "$KUBECONFIG" -csi-address "$tmp/csi.sock" \
        -retry-interval-start=200ms -kube-api-qps=100 -kube-api-burst=200
    start_role csi-loopback statefulset/csi-loopback metadata "$@"
    await "the SnapshotMetadataService" kubectl get snapshotmetadataservice "$driver_name"
}

# make_claim SIZE ACCESS_MODE VOLUME_MODE: $volume in Kubernetes. No controller binds claims here.
make_claim() {
    local handle common="accessModes: [$2], volumeMode: $3, storageClassName: ''"
    handle=$("$driver" volume list --output json | jq -r '.[0].id')
    quietly kubectl create -f - <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {$common, volumeName: pv-data, resources: {requests: {storage: $1}}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: pv-data}
spec:
  {$common, persistentVolumeReclaimPolicy: Retain, capacity: {storage: $1},
   csi: {driver: $driver_name, volumeHandle: $handle}, claimRef: {namespace: $namespace, name: data}}
END
    quietly kubectl patch pv pv-data -p "spec: {claimRef: {uid: $(kubectl get pvc data -o 'jsonpath={.metadata.uid}')}}"
    quietly kubectl patch pvc data --subresource=status -p "status: {phase: Bound, capacity: {storage: $1}}"
}

request_snapshot() { # request_snapshot NAME: a VolumeSnapshot of the claim
    cat >"snapshot-$1.yaml" <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec: {source: {persistentVolumeClaimName: data}, volumeSnapshotClassName: csi-loopback}
END
    as administrator shell kubectl create -f "snapshot-$1.yaml"
}

# take_snapshots: makes a volume with a claim, and its VolumeSnapshots monday and tuesday.
take_snapshots() {
    say "creating a volume with a PersistentVolumeClaim, published as a block device"
    show volume create "$volume" --size 1Gi --block
    publish_volume --block
    make_claim 1Gi ReadWriteOnce Block
    say "writing, then taking the VolumeSnapshot monday"
    shell dd if=/dev/urandom of=target bs=1M seek=0 count=8 conv=notrunc,fsync status=none
    shell dd if=/dev/urandom of=target bs=1M seek=64 count=1 conv=notrunc,fsync status=none
    request_snapshot monday
    wait_for volumesnapshot/monday jsonpath='{.status.readyToUse}'=true
    say "changing, then taking the VolumeSnapshot tuesday"
    shell dd if=/dev/urandom of=target bs=64K seek=64 count=1 conv=notrunc,fsync status=none
    shell dd if=/dev/urandom of=target bs=1M seek=300 count=2 conv=notrunc,fsync status=none
    shell blkdiscard --offset 64MiB --length 512KiB target
    request_snapshot tuesday
    wait_for volumesnapshot/tuesday jsonpath='{.status.readyToUse}'=true
}

handle_of() { # handle_of NAME: the CSI handle of a VolumeSnapshot
    kubectl get volumesnapshotcontent \
        -o 'jsonpath={.items[?(@.spec.volumeSnapshotRef.name == "'"$1"'")].status.snapshotHandle}'
}
