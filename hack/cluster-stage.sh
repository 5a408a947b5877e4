# shellcheck shell=bash
# What the demonstrations with an API server have in common: cluster, accounts, a volume with its claim, VolumeSnapshots.
# Who sources it sets `namespace` to where claim and snapshots are, and makes that namespace and the VolumeSnapshotClass `loopback`.
# Sourced after stage.sh, never run.
# shellcheck disable=SC2154 # what lib.sh and stage.sh set

driver_name=loopback.csi.local
volume=demo
volume_id=
# Flags of kubectl, once there is a cluster.
administrator=()

kubectl() { "$tmp/cluster/tools/kubectl" "${administrator[@]}" "$@"; }

# tell COMMAND...: a command that is not of the binary, told before it is run.
tell() {
    printf '%s    $ %s%s\n' "$dim" "${*//"$tmp"/\$tmp}" "$plain"
}

# until_so SECONDS WHAT COMMAND...: waits until the command succeeds.
until_so() {
    local deadline=$((SECONDS + $1)) what=$2 pid
    shift 2
    until "$@" >/dev/null 2>&1; do
        for pid in "${running[@]}"; do
            kill -0 "$pid" 2>/dev/null || die "${name_of[$pid]} has ended"
        done
        ((SECONDS < deadline)) || die "$what: not within the time"
        sleep 0.1
    done
}

take_down() {
    local how=$1 snapshot
    "$how" "$driver" volume unpublish "$volume" --target "$tmp/device" --timeout 30s
    "$how" "$driver" volume unstage "$volume" --staging "$tmp/staging" --timeout 30s
    while read -r snapshot; do
        "$how" "$driver" snapshot delete "$snapshot" --timeout 30s
    done < <("$driver" snapshot list --output json 2>/dev/null | jq -r '.[].id')
    "$how" "$driver" volume delete "$volume" --timeout 30s
}

start_cluster() {
    # On its own, so that the build of the first run is seen.
    kubernetes_tools >/dev/null || die "needs the Kubernetes tools"
    start cluster "$repo/hack/cluster.sh" "$tmp/cluster"
    until_so 300 "the API server" test -e "$tmp/cluster/ready"
    administrator=(--kubeconfig "$tmp/cluster/kubeconfig" --cache-dir "$tmp/cache")
}

# kubeconfig_of NAMESPACE NAME: writes $tmp/NAME.kubeconfig, with which a program is that ServiceAccount.
kubeconfig_of() {
    local token
    token=$(kubectl -n "$1" create token "$2" --duration=1h)
    sed "s/client-certificate-data:.*/token: $token/; /client-key-data:/d" "$tmp/cluster/kubeconfig" \
        >"$tmp/$2.kubeconfig"
}

# free_port: below those that the kernel gives away by itself.
free_port() {
    local port
    while :; do
        port=$((20000 + SRANDOM % 12000))
        (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    done
    printf '%s\n' "$port"
}

healthy() { # healthy PORT HTTP_PORT
    local first
    (: <"/dev/tcp/127.0.0.1/$1") || return
    exec 3<>"/dev/tcp/127.0.0.1/$2" || return
    printf 'GET /health HTTP/1.0\r\n\r\n' >&3
    read -r first <&3
    exec 3>&-
    [[ $first == *' 200 '* ]]
}

# The volume as Kubernetes knows it. No controller binds claims here, so it is done by hand.
make_claim() {
    local uid common='accessModes: [ReadWriteOnce], volumeMode: Block, storageClassName: ""'
    kubectl apply -f - >/dev/null <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: $namespace}
spec: {$common, volumeName: data, resources: {requests: {storage: 1Gi}}}
END
    uid=$(kubectl -n "$namespace" get pvc data -o 'jsonpath={.metadata.uid}')
    kubectl apply -f - >/dev/null <<END
apiVersion: v1
kind: PersistentVolume
metadata: {name: data}
spec:
  {$common, persistentVolumeReclaimPolicy: Retain, capacity: {storage: 1Gi},
   csi: {driver: $driver_name, volumeHandle: $volume_id},
   claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: $namespace, name: data, uid: $uid}}
END
    kubectl patch pv data --subresource=status --type=merge -p '{"status":{"phase":"Bound"}}' >/dev/null
    kubectl -n "$namespace" patch pvc data --subresource=status --type=merge \
        -p '{"status":{"phase":"Bound","capacity":{"storage":"1Gi"}}}' >/dev/null
}

begin_snapshot() { # begin_snapshot NAME: as a VolumeSnapshot, which need not be ready yet
    tell kubectl -n "$namespace" apply -f "volumesnapshot-$1.yaml"
    kubectl apply -f - <<END | sed 's/^/    /'
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1, namespace: $namespace}
spec: {source: {persistentVolumeClaimName: data}, volumeSnapshotClassName: loopback}
END
}

take_snapshot() { # take_snapshot NAME
    begin_snapshot "$1"
    run "$tmp/cluster/tools/kubectl" "${administrator[@]}" -n "$namespace" wait --timeout=60s \
        --for=jsonpath='{.status.readyToUse}'=true "volumesnapshot/$1" >"$tmp/wait.log"
}

# The volume in Kubernetes' eyes, and the same as a block device.
make_volume() {
    show volume create "$volume" --size 1Gi --block
    show volume stage "$volume" --staging "$tmp/staging" --block
    show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/device" --block
    volume_id=$("$driver" volume list --output json | jq -r '.[0].id')
    make_claim
}

start_snapshotter() {
    start csi-snapshotter "$tmp/cluster/tools/csi-snapshotter" -kubeconfig "$tmp/cluster/kubeconfig" \
        -csi-address "$tmp/csi.sock" -retry-interval-start=200ms -kube-api-qps=100 -kube-api-burst=200
}

# handle_of NAME: the CSI handle of a VolumeSnapshot.
handle_of() {
    local content
    content=$(kubectl -n "$namespace" get volumesnapshot "$1" -o 'jsonpath={.status.boundVolumeSnapshotContentName}')
    kubectl get volumesnapshotcontent "$content" -o 'jsonpath={.status.snapshotHandle}'
}

write() { # write MIB_OFFSET KIB: that much random data
    dd if=/dev/urandom of="$tmp/device" bs=1K seek=$(($1 << 10)) count="$2" conv=notrunc,fsync status=none
    printf '    %5d KiB at %d MiB written\n' "$2" "$1"
}
