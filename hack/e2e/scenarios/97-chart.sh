#!/usr/bin/env bash
# Scenario: the Helm chart equals the kustomizations, and installs, upgrades and uninstalls
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

helm() { in_network env KUBECONFIG="$e2e/kubeconfig" "$e2e/tools/helm" "$@"; }

# sorted: the objects of stdin in the order and the notation of kustomize.
sorted() {
    local directory
    directory=$(mktemp -d "$e2e/sorted.XXXXXX")
    cat >"$directory/all.yaml"
    printf 'kind: Kustomization\nsortOptions: {order: legacy}\nresources: [all.yaml]\n' >"$directory/kustomization.yaml"
    "$e2e/tools/kubectl" kustomize "$directory" && rm -r "$directory"
}

same() { # same VALUES DIRECTORY...: whether the chart with these values has the objects of the directories
    local values=$1 directory
    shift
    equal "helm template --set $values" "$(for directory; do echo --- && "$e2e/tools/kubectl" kustomize "$directory"; done | sorted)" \
        "$(helm template csi-loopback deploy/chart --set "$values" 2>/dev/null | sorted)"
}

# All switches of values.yaml: "NAME: false" below a component.
all=$(awk '/^[a-zA-Z]+:/ { of = $1 } /^  [a-z]+: false$/ { print of $1 "true" }' deploy/chart/values.yaml | sed 's/:/./; s/:/=/' | paste -sd ,)

step "lint; the same objects as the kustomizations"
quietly helm lint deploy/chart
quietly helm lint deploy/chart --set "$all"
KUBECTL=$e2e/tools/kubectl quietly hack/chart.sh --check
same image.tag=0.1.0 deploy/base
same runtime.enabled=true deploy/runtime
same nodeProxy.enabled=true deploy/node-proxy
same sessionManager.enabled=true deploy/base deploy/session-manager
same aggregatedApi.enabled=true "$(overlay_of chart base cbt-http)" deploy/aggregated-api
same admission.enabled=true deploy/base deploy/admission
same inline.enabled=true deploy/base deploy/inline
same snapshotterSecret.enabled=true "$(overlay_of chart base snapshotter-secret)"
same certManager.enabled=true "$(overlay_of chart base cert-manager/metadata)"
same "$all" \
    "$(overlay_of chart node-proxy node-proxy-claims cbt-http snapshotter-secret cert-manager/metadata)" \
    "$(overlay_of chart-sessions session-manager cert-manager/session-manager)" \
    "$(overlay_of chart-api aggregated-api aggregated-api-secrets cert-manager/aggregated-api)" \
    "$(overlay_of chart-admission admission cert-manager/admission)" deploy/inline
step "images pinned by digest"
digest=sha256:$(printf '%064d' 1)
PIN_DIR=$overlay/pinned quietly hack/pin.sh "registry.example/csi-loopback:0.1.0@$digest" \
    {csi-provisioner,csi-snapshotter,csi-resizer,csi-node-driver-registrar,livenessprobe}@"$digest"
images=$(helm template csi-loopback deploy/chart --set "$all" --values "$overlay/pinned/values.yaml" 2>/dev/null |
    sed -n 's/^[ -]*image: //p')
[[ -n $images ]]
equal "images without a digest" "" "$(grep -v "@$digest\"$" <<<"$images" || true)"
step "install"
quietly kubectl label node node loopback.csi.local/pool=true
quietly helm install csi-loopback deploy/chart --set sessionManager.enabled=true --wait --timeout "${patience}s"
quietly kubectl apply --server-side -k deploy/examples/volume
await condition=Ready -n backup-demo pod/writer
step "upgrade, with another component; what roles have written stays"
authority() { kubectl -n csi-loopback get secret csi-loopback-metadata-tls -o jsonpath='{.data}'; }
before=$(authority)
quietly helm upgrade csi-loopback deploy/chart --set sessionManager.enabled=true,admission.enabled=true --wait --timeout "${patience}s"
[[ -n $before ]]
equal "the sidecar's authority" "$before" "$(authority)"
step "uninstall"
delete -k deploy/examples/volume
eventually volumes_are_gone
quietly helm uninstall csi-loopback --wait --timeout "${patience}s"
equal "objects" "" "$(kubectl get all,csidrivers,storageclasses,clusterroles,clusterrolebindings,secrets --all-namespaces -o name | grep loopback || true)"
delete snapshotmetadataservice,snapshotserviceconfiguration loopback.csi.local
delete -f deploy/crds
quietly kubectl label node node loopback.csi.local/pool-
on_node rm -r /var/lib/csi-loopback /var/lib/kubelet/plugins/loopback.csi.local
