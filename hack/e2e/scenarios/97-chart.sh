#!/usr/bin/env bash
# Scenario: the Helm chart installs, passes its test, upgrades and uninstalls
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

helm() { in_network env KUBECONFIG="$e2e/kubeconfig" "$e2e/tools/helm" "$@"; }

# Every optional component.
all=runtime.enabled=true,nodeProxy.enabled=true,sessionManager.enabled=true,aggregatedApi.enabled=true,admission.enabled=true,inline.enabled=true

chart=deploy/chart
if [[ -n ${CSI_LOOPBACK_RELEASE:-} ]]; then
    step "the chart of a release: its image is found by the digest"
    chart=$(echo "$CSI_LOOPBACK_RELEASE"/csi-loopback-chart-*.tgz)
    image=$(helm template csi-loopback "$chart" | sed -nE 's/^[ -]*image: "(.*csi-loopback:[^@]*@.*)"$/\1/p' | head -n 1)
    [[ $image =~ ^(.*):([^:@]+)@(.*)$ ]]
    reference=${BASH_REMATCH[1]}@${BASH_REMATCH[3]}
    # A name without a registry means Docker's.
    [[ $reference == */* ]] || reference=docker.io/library/$reference
    # As after a pull from a registry.
    quietly on_node ctr --namespace k8s.io images tag --force "docker.io/library/csi-loopback:${BASH_REMATCH[2]}" "$reference"
fi
step "images pinned by digest"
digest=sha256:$(printf '%064d' 1)
PIN_DIR=$overlay/pinned quietly hack/pin.sh "registry.example/csi-loopback:0.1.0@$digest" \
    {csi-provisioner,csi-snapshotter,csi-resizer,csi-node-driver-registrar,livenessprobe}@"$digest"
images=$(helm template csi-loopback "$chart" --set "$all" --values "$overlay/pinned/values.yaml" 2>/dev/null |
    sed -n 's/^[ -]*image: //p')
[[ -n $images ]]
equal "images without a digest" "" "$(grep -v "@$digest\"$" <<<"$images" || true)"
step "install"
quietly kubectl label node node loopback.csi.local/pool=true
# The sidecars are built here, so they have other digests than those of a registry.
sidecars=$(printf 'sidecarDigests.%s=,' csi-{provisioner,snapshotter,resizer,node-driver-registrar} livenessprobe)
quietly helm install csi-loopback "$chart" --set sessionManager.enabled=true,pool.kind=image,pool.size=2Gi,"${sidecars%,}" \
    --wait --timeout "${patience}s"
step "helm test"
quietly helm test csi-loopback --timeout "${patience}s"
quietly kubectl apply --server-side -k deploy/examples/volume
await condition=Ready -n backup-demo pod/writer
step "upgrade, with another component; what roles have written stays"
authority() { kubectl -n csi-loopback get secret csi-loopback-metadata-tls -o jsonpath='{.data}'; }
before=$(authority)
quietly helm upgrade csi-loopback "$chart" --reset-then-reuse-values --set admission.enabled=true --wait --timeout "${patience}s"
[[ -n $before ]]
equal "the sidecar's authority" "$before" "$(authority)"
step "uninstall"
delete -k deploy/examples/volume
eventually volumes_are_gone
quietly helm uninstall csi-loopback --wait --timeout "${patience}s"
equal "objects" "" "$(kubectl get all,csidrivers,storageclasses,clusterroles,clusterrolebindings,secrets --all-namespaces -o name | grep loopback || true)"
delete snapshotmetadataservice,snapshotserviceconfiguration loopback.csi.local
delete -f deploy/crds -f deploy/crds-upstream
quietly kubectl label node node loopback.csi.local/pool-
on_node rm -r /var/lib/csi-loopback /var/lib/kubelet/plugins/loopback.csi.local
