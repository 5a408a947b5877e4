#!/usr/bin/env bash
# Scenario: csi-sanity, in a pod, against the driver of the cluster
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"
# shellcheck source=hack/ginkgo.sh
source "$repo/hack/ginkgo.sh"
# shellcheck source=hack/sanity-specs.sh
source "$repo/hack/sanity-specs.sh"

# In a directory that the driver's container shares: elsewhere it could not mount.
directory=/var/lib/kubelet/plugins/csi-sanity
socket=/var/lib/kubelet/plugins/loopback.csi.local
image=localhost/csi-sanity:e2e

clean_up() {
    kubectl delete --ignore-not-found --timeout="${patience}s" namespace csi-sanity >/dev/null 2>&1 || true
    on_node rm -rf "$directory"
}
trap clean_up EXIT

run_sanity() { # run_sanity ACCESS_TYPE
    local access=$1 report=$directory/$1/report.json
    on_node mkdir -p "$directory/$access"
    apply <<END
apiVersion: v1
kind: Pod
metadata: {name: $access, namespace: csi-sanity}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  containers:
    - name: csi-sanity
      image: $image
      args:
        - --csi.endpoint=unix://$socket/csi.sock
        - --csi.mountdir=$directory/$access/mount
        - --csi.stagingdir=$directory/$access/staging
        - --csi.testvolumeaccesstype=$access
        - --csi.testvolumesize=134217728
        - --csi.testvolumeexpandsize=268435456
        - --ginkgo.skip=$faulty_spec
        - --ginkgo.no-color
        - --ginkgo.timeout=20m
        - --ginkgo.json-report=$report
      securityContext: {privileged: true}
      volumeMounts:
        - {name: socket, mountPath: $socket}
        - {name: directory, mountPath: $directory, mountPropagation: HostToContainer}
  volumes:
    - name: socket
      hostPath: {path: $socket, type: Directory}
    - name: directory
      hostPath: {path: $directory, type: Directory}
END
    # Both ends of the pod are an answer; the report says which.
    eventually has_ended csi-sanity "$access"
    on_node cat "$report" >"$e2e/sanity.json"
    report_is_complete "$e2e/sanity.json" || {
        kubectl -n csi-sanity logs "$access" --tail=40
        return 1
    }
}

unexpected=0
total=(0 0 0)
step "an image with csi-sanity"
program_image "$(csi_sanity)" "$image" csi-sanity
load_image "$e2e/images/csi-sanity.tar"
quietly kubectl create namespace csi-sanity
for access in mount block; do
    step "volumes of type $access"
    run_sanity "$access"
    read -r passed failed pending skipped < <(report_counts "$e2e/sanity.json")
    report_failures "$e2e/sanity.json"
    total=($((total[0] + passed)) $((total[1] + failed)) $((total[2] + pending + skipped)))
    for state in skipped pending; do
        while IFS=$'\t' read -r spec reason; do
            explanation "$state" "$spec" "$reason" >/dev/null || {
                printf '  unexpectedly %s: %s: %s\n' "$state" "$spec" "$reason"
                unexpected=$((unexpected + 1))
            }
        done < <(report_specs "$e2e/sanity.json" "$state")
    done
done
rm -f "$e2e/sanity.json"
count csi-sanity "${total[0]}" $((total[1] + unexpected)) $((total[2] - unexpected))
