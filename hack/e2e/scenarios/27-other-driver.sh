#!/usr/bin/env bash
# Scenario: deploy/examples/other-driver with a second driver that has no sidecar; listings of its snapshots
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

other=$overlay/other-driver
driver=block.csi.example.com

# manifests_of_the_provider: the driver of deploy/base under another name and without its sidecar, as another provider ships it.
manifests_of_the_provider() {
    kubectl kustomize deploy/base |
        sed -e 's|csi-loopback:0|IMAGE:0|; s|csi-loopback|block-csi|g; s|IMAGE:0|csi-loopback:0|' -e "s|loopback\.csi\.local|$driver|g" |
        kubectl create --dry-run=client -o json -f - | jq --slurp '
            { apiVersion: "v1", kind: "List", items: map(.items // [.]) | add | map(
                select((.metadata.name | endswith("-metadata") or endswith("-tls") | not) or .kind == "ServiceAccount")
                | if .kind == "StatefulSet" and .metadata.name == "block-csi" then
                    .spec.template.spec |= (.automountServiceAccountToken = true
                        | .containers |= map(select(.name != "metadata")
                            | if .name == "driver" then .args += ["--pool-sparse", "--pool-size=2Gi"] else . end))
                  else . end) }'
}

clean_up() {
    kubectl -n "$namespace" delete --ignore-not-found --timeout="${patience}s" pod/other volumesnapshot/other-1 volumesnapshot/other-2 \
        pvc/other >/dev/null 2>&1 || true
    kubectl delete --ignore-not-found --timeout="${patience}s" -k "$other" >/dev/null 2>&1 || true
    kubectl delete --ignore-not-found "snapshotmetadataservice/$driver" >/dev/null 2>&1 || true
    kubectl label node node "$driver/pool-" >/dev/null 2>&1 || true
    on_node rm -rf /var/lib/block-csi "/var/lib/kubelet/plugins/$driver"
}
trap clean_up EXIT

step "the driver, with the sidecar"
rm -rf "$other"
cp -r deploy/examples/other-driver "$other"
manifests_of_the_provider >"$other/driver.yaml"
sed -i 's|serviceAccount: .*|serviceAccount: block-csi-metadata|' "$other/parameters.yaml"
quietly kubectl label node node "$driver/pool=true"
quietly kubectl apply --server-side -k "$other"
rollout block-csi statefulset/block-csi statefulset/block-csi-controller
eventually kubectl get "snapshotmetadataservice/$driver"

step "a block volume with two snapshots"
claim other 64Mi "volumeMode: Block" "storageClassName: block-csi"
user other other
in_pod other 'head -c 1048576 /dev/urandom | dd of=/device bs=1M seek=8 conv=notrunc,fsync 2>/dev/null'
for number in 1 2; do
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: other-$number, namespace: $namespace}
spec: {volumeSnapshotClassName: block-csi, source: {persistentVolumeClaimName: other}}
END
    await jsonpath='{.status.readyToUse}=true' -n "$namespace" "volumesnapshot/other-$number"
    in_pod other 'dd if=/dev/urandom of=/device bs=4096 count=1 seek=4096 conv=notrunc,fsync 2>/dev/null'
done

step "allocated and delta by SnapshotMetadata"
# The audience is the driver's name.
token=$(kubectl -n backup-client create token client --audience="$driver")
kubectl -n backup-client exec -i client -- sh -c 'cat >/tmp/other' <<<"$token"
listed() {
    client snapshot "$@" --namespace="$namespace" --token-file=/tmp/other --output=json | jq -r '.extents[] | "\(.offset) \(.length)"' |
        join_extents
}
equal "blocks of other-1" "8388608 1048576" "$(listed allocated other-1)"
equal "changes to other-2" "16777216 4096" "$(listed delta other-1 other-2)"
clean_up
rest=$(kubectl get persistentvolumes -o json | jq -r '.items[] | select(.spec.storageClassName == "block-csi") | .metadata.name')
equal "volumes of the driver" "" "$rest"
