# shellcheck shell=bash disable=SC2034,SC2154
# Shared functions of the scenes of hack/demo.sh: output, processes, cleanup, a driver with a
# volume, and a cluster with snapshots of that volume. Source this file after lib.sh; do not run it.
# A scene starts with `begin`.

driver_name=loopback.csi.local
volume=demo
# Namespace of claims, snapshots and pods.
namespace=backup-demo
# Additional flags of the driver.
driver_flags=()
# Timeout of a wait in seconds.
patience=120

tmp=
# Names of started programs, newest first; process ids of running ones.
started=()
declare -A pid_of=()
outcome="cleaned up"
before_clean_up() { :; } # overridden by scenes that must clean up while their programs run
bold='' dim='' plain=''
[[ ! -t 1 ]] || bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
# The original stdout and stderr, for functions whose output is redirected.
exec {screen}>&1 {errors}>&2

say() { printf '%s==> %s%s\n' "$bold" "$*" "$plain"; }
print_command() { printf '%s    $ %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain" >&"$screen"; }
indent() { sed "s|$tmp|\$tmp|g; s/^/    /"; }
quietly() { "$@" >>"$tmp/quiet.log"; }
wait_for() { quietly run kubectl wait --timeout="${patience}s" "$1" --for="$2"; } # wait_for OBJECT CONDITION

# run COMMAND...: runs the command in the background, because bash handles signals during `wait`,
# but not during a foreground command. In its own session: an interrupt from the terminal reaches
# only this script, which stops everything in order.
run() {
    local status=0
    setsid "$@" &
    pid_of[command]=$!
    wait "$!" || status=$?
    unset 'pid_of[command]'
    return "$status"
}

show() { # show ARGUMENT...: prints and runs a csi-loopback command
    print_command csi-loopback "$@"
    run "$driver" "$@"
}
shell() { # shell COMMAND...: prints and runs another command
    print_command "$@"
    "$@" 2>&1 | indent
}

rejected() { # rejected TEXT COMMAND...: runs a command that must fail with TEXT in its output
    ! "${@:2}" >"$tmp/rejection" 2>&1 || die "not rejected: $(<"$tmp/rejection")"
    indent <"$tmp/rejection"
    grep -qF -- "$1" "$tmp/rejection" || die "rejected without: $1"
}

same() { # same NAME EXTENTS OTHER_EXTENTS: fails if the lists differ
    [[ -n $2 && $2 == "$3" ]] || die "$1: lists differ: $2 and $3"
    printf '    %s: the same %d extents\n' "$1" "$(wc -l <<<"$2")"
}

await() { # await NAME COMMAND...: waits until the command succeeds
    local name deadline=$((SECONDS + patience))
    until "${@:2}" >/dev/null 2>&1; do
        for name in "${!pid_of[@]}"; do
            kill -0 "${pid_of[$name]}" 2>/dev/null || die "$name ended unexpectedly"
        done
        ((SECONDS < deadline)) || die "$1: timeout after $patience s"
        sleep 0.1
    done
}

start() { # start NAME COMMAND...: in the background, in its own session, with its output in $tmp/NAME.log
    setsid "${@:2}" >"$tmp/$1.log" 2>&1 </dev/null {screen}>&- {errors}>&- &
    pid_of[$1]=$!
    started=("$1" "${started[@]}")
}

stop() { # stop NAME...: sends SIGTERM to each process group. A running verification then removes its volumes
    local name pid
    for name; do
        pid=${pid_of[$name]:-}
        [[ -n $pid ]] || continue
        # The process group exists after setsid.
        kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" 2>/dev/null || true
        # A stopped process handles the signal after SIGCONT.
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

# begin COMMAND...: installs missing commands, finds or builds the binary, and creates $tmp. All
# later files are below $tmp, and all later processes have it as TMPDIR, which identifies them for
# the cleanup.
begin() {
    is_root || die "needs root, for loop devices and mounts: sudo $0"
    install_missing "${storage_commands[@]}" setsid jq curl "$@" || die "required commands are missing"
    driver=${CSI_LOOPBACK_BIN:-}
    if [[ -z $driver ]]; then
        command -v cargo >/dev/null || die "cargo is not in PATH; install Rust"
        install_missing gcc || die "gcc is missing"
        say "building csi-loopback"
        # Without what only helps to change and debug the program: a seventh less to compute.
        run env --chdir="$repo" CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_CODEGEN_UNITS=2 \
            cargo build --locked || die "the build failed"
        driver=$(cd "$repo" && realpath "${CARGO_TARGET_DIR:-target}")/debug/csi-loopback
    fi
    driver=$(realpath "$driver")
    [[ -x $driver ]] || die "$driver is not executable; set CSI_LOOPBACK_BIN to the binary"
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/csi-loopback-demo.XXXXXX")
    export TMPDIR=$tmp CSI_ENDPOINT=unix://$tmp/csi.sock
    cd "$tmp" || exit
}

# in_use: prints remaining processes, mounts and loop devices of this run. It waits up to five
# seconds: the kernel releases a loop device a moment after its last user.
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

cleanup() { # cleanup STATUS: stops all processes, removes all files, and exits with STATUS
    local status=$1 found='' pid
    # A second interrupt must not stop the cleanup.
    trap '' INT TERM HUP PIPE
    trap - EXIT
    set +e
    exec 1>&"$screen" 2>&"$errors"
    stop command
    if [[ -n $tmp ]]; then
        [[ $outcome == "done" ]] || say "interrupted or failed: cleaning up"
        before_clean_up
        stop "${started[@]}"
        # Processes that were interrupted before they were in pid_of.
        while read -r pid _; do
            pid_of[$pid]=$pid
            stop "$pid"
        done < <(processes_of "$tmp")
        ((status == 0 || status >= 128)) || tail -n 20 "$tmp"/*.log 2>/dev/null
        # A complete scene has removed everything through the driver; check this before the forced
        # cleanup.
        [[ $outcome != "done" ]] || found=$(in_use)
        clear_directory "$tmp"
        unset TMPDIR
        found+=$(in_use && find "$tmp" -maxdepth 1 2>/dev/null)
    fi
    if [[ -n $found ]]; then
        printf 'remaining:\n%s\n' "$found" >&2
        ((status != 0)) || status=1
    elif [[ -n $tmp || $status -ge 128 ]]; then
        say "$outcome: no mount, loop device, process or file is left"
    fi
    exit "$status"
}

# Each trap calls cleanup: an interrupt can also make a command fail and start the EXIT trap, and an
# `exit` in the signal trap would end the EXIT trap before its first command.
trap 'cleanup $?' EXIT
trap 'cleanup 130' INT
trap 'cleanup 143' TERM
trap 'cleanup 129' HUP
trap 'cleanup 141' PIPE

start_driver() {
    start driver "$driver" --mode driver --endpoint "$CSI_ENDPOINT" --data-dir "$tmp/data" --pool auto --pool-sparse "${driver_flags[@]}"
    await "the driver" "$driver" volume list --timeout 5s
}

publish_volume() { # publish_volume MODE...: stages $volume and publishes it at $tmp/target
    show volume stage "$volume" --staging "$tmp/staging" "$@"
    show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" "$@"
}

remove_volume() { # deletes $volume and its snapshots through the driver
    local snapshot
    say "removing the volume and its snapshots"
    run "$driver" volume unpublish "$volume" --target "$tmp/target" --if-published
    run "$driver" volume unstage "$volume" --staging "$tmp/staging" --if-staged
    for snapshot in $("$driver" snapshot list --output json | jq -r '.[].id'); do
        run "$driver" snapshot delete "$snapshot"
    done
    run "$driver" volume delete "$volume"
}

extents() { # extents ARGUMENT...: prints the extents of a `snapshot` command, one JSON array per line
    "$driver" snapshot "$@" --output json | jq -c '.extents[] | [.offset, .length]'
}

# start_crust_ops DIR [PREFIX...]: starts crust_ops for the runtime with the configuration
# DIR/oci-runtime.yaml, in the namespaces that the command PREFIX enters. Sets driver_flags.
start_crust_ops() {
    start crust-ops "${@:2}" "$driver" --mode runtime-ops --endpoint "unix://$tmp/crust.sock" --crust-dir "$1/crust" \
        --cli-env "CSI_LOOPBACK_RUNC_CONFIG=$1/oci-runtime.yaml"
    await crust_ops test -S "$tmp/crust.sock"
    driver_flags=(--enable-defer-fs-ops --crust-endpoint "unix://$tmp/crust.sock")
}

start_cluster() {
    say "starting an API server, etcd and the snapshot-controller in \$tmp ($tmp)"
    # Built here, so that the progress of the first build is visible.
    kubernetes_tools >/dev/null || die "the Kubernetes tools are missing"
    start cluster "$repo/hack/cluster.sh" "$tmp/cluster"
    await "the API server" test -e "$tmp/cluster/ready"
    PATH=$tmp/cluster/tools:$PATH
    cp cluster/kubeconfig administrator.kubeconfig
    act_as administrator
    kubectl config set-context --current --namespace="$namespace" >/dev/null
}

act_as() { export KUBECONFIG=$tmp/$1.kubeconfig KUBECACHEDIR=$tmp/$1.cache; } # act_as ACCOUNT: for later commands
as() { KUBECONFIG=$tmp/$1.kubeconfig KUBECACHEDIR=$tmp/$1.cache "${@:2}"; } # as ACCOUNT COMMAND...

kubeconfig_of() { # kubeconfig_of NAMESPACE NAME: writes $tmp/NAME.kubeconfig, for a ServiceAccount
    local token
    token=$(kubectl -n "$1" create token "$2" --duration=1h)
    sed "s/client-certificate-data:.*/token: $token/; /client-key-data:/d" administrator.kubeconfig >"$2.kubeconfig"
}

# apply DIRECTORY...: applies directories of deploy/. Without nodes, their pods do not start;
# start_role runs their containers.
apply() {
    local directory
    for directory; do
        print_command kubectl apply --server-side -k "deploy/$directory"
        quietly kubectl apply --server-side -k "$repo/deploy/$directory"
    done
}

make_stranger() { # make_stranger RESOURCE: a ServiceAccount that may create RESOURCE and read no snapshots
    quietly kubectl create serviceaccount stranger
    quietly kubectl create role stranger --verb=create,get --resource="$1"
    quietly kubectl create rolebinding stranger --role=stranger --serviceaccount="$namespace:stranger"
    kubeconfig_of "$namespace" stranger
}

# start_role NAMESPACE WORKLOAD CONTAINER FLAG...: runs the command of a container of deploy/ with
# its flags and its ServiceAccount. Replaces ports, sockets and addresses with those of this
# machine, and flags with FLAG=VALUE. Sets port and http.
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

# call_by_url PORT: changes all webhook configurations to localhost:PORT, because the API server
# cannot reach Services.
call_by_url() {
    kubectl get mutatingwebhookconfigurations,validatingwebhookconfigurations -o json |
        jq '.items[].webhooks[].clientConfig |= {url: ("https://localhost:'"$1"'" + .service.path)}' |
        quietly kubectl replace -f -
}

start_storage() { # start_storage FLAG...: starts the driver, csi-snapshotter, and the sidecar of deploy/base with FLAGs
    start_driver
    start csi-snapshotter csi-snapshotter -kubeconfig "$KUBECONFIG" -csi-address "$tmp/csi.sock" \
        -retry-interval-start=200ms -kube-api-qps=100 -kube-api-burst=200
    start_role csi-loopback statefulset/csi-loopback metadata "$@"
    await "the SnapshotMetadataService" kubectl get snapshotmetadataservice "$driver_name"
}

# make_claim SIZE ACCESS_MODE VOLUME_MODE: creates a bound PersistentVolumeClaim for $volume. No
# controller binds claims.
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

request_snapshot() { # request_snapshot NAME: creates a VolumeSnapshot of the claim
    cat >"snapshot-$1.yaml" <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec: {source: {persistentVolumeClaimName: data}, volumeSnapshotClassName: csi-loopback}
END
    as administrator shell kubectl create -f "snapshot-$1.yaml"
}

# take_snapshots: creates a volume with a claim, and its VolumeSnapshots monday and tuesday.
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

handle_of() { # handle_of NAME: prints the CSI handle of a VolumeSnapshot
    kubectl get volumesnapshotcontent \
        -o 'jsonpath={.items[?(@.spec.volumeSnapshotRef.name == "'"$1"'")].status.snapshotHandle}'
}
