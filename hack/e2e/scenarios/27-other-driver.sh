#!/usr/bin/env bash
# Scenario: docs/guide/other-driver.md, its commands as printed, with a second driver that has no sidecar
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

work=$e2e/other-driver
other=$work/deploy/examples/other-driver
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

# is_unused: whether the driver has nothing to delete any more. Its pods must run until then.
is_unused() {
    local rest
    rest=$(kubectl get persistentvolumes,volumesnapshotcontents -o json |
        jq -r --arg driver "$driver" '.items[] | select(.spec.csi.driver == $driver or .spec.driver == $driver) | .metadata.name') &&
        equal "volumes and contents of the driver" "" "$rest"
}

clean_up() {
    kubectl -n "$namespace" delete --ignore-not-found --timeout="${patience}s" pod/other volumesnapshot/monday volumesnapshot/tuesday \
        pvc/other >/dev/null 2>&1 || true
    eventually is_unused || true
    kubectl delete --ignore-not-found --timeout="${patience}s" -k "$other" >/dev/null 2>&1 || true
    kubectl delete --ignore-not-found "snapshotmetadataservice/$driver" >/dev/null 2>&1 || true
    kubectl label node node "$driver/pool-" >/dev/null 2>&1 || true
    on_node rm -rf /var/lib/block-csi "/var/lib/kubelet/plugins/$driver"
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT

# run FILTER...: runs the commands of the page that grep selects, in a copy of deploy/.
run() {
    commands_of "$repo/docs/guide/other-driver.md" "Install the sidecar" | grep "$@" >"$work/commands"
    [[ -s $work/commands ]]
    # shellcheck source=/dev/null
    (cd "$work" && source ./commands) >"$work/output"
}

# The program in the cluster. The audience of tokens is the driver's name.
csi-loopback() { client "$@" --token-file=/tmp/other --output=json; }

step "the driver, with the sidecar"
rm -rf "$work"
mkdir "$work"
cp -r deploy "$work"
manifests_of_the_provider >"$other/driver.yaml"
sed -i 's|serviceAccount: .*|serviceAccount: block-csi-metadata|' "$other/parameters.yaml"
quietly kubectl label node node "$driver/pool=true"
run -v '^ *csi-loopback'
grep -q 'kind: StatefulSet' "$work/output"
rollout block-csi statefulset/block-csi statefulset/block-csi-controller

step "a block volume with two snapshots"
claim other 64Mi "volumeMode: Block" "storageClassName: block-csi"
user other other
in_pod other 'head -c 1048576 /dev/urandom | dd of=/device bs=1M seek=8 conv=notrunc,fsync 2>/dev/null'
for name in monday tuesday; do
    snapshot "$name" other block-csi
    in_pod other 'dd if=/dev/urandom of=/device bs=4096 count=1 seek=4096 conv=notrunc,fsync 2>/dev/null'
done

step "allocated and delta by SnapshotMetadata"
token=$(kubectl -n backup-client create token client --audience="$driver")
kubectl -n backup-client exec -i client -- sh -c 'cat >/tmp/other' <<<"$token"
run '^ *csi-loopback'
listed() { jq --slurp -r ".[$1].extents[] | \"\\(.offset) \\(.length)\"" "$work/output" | join_extents; }
equal "blocks of monday" "8388608 1048576" "$(listed 0)"
equal "changes to tuesday" "16777216 4096" "$(listed 1)"
clean_up
is_unused
