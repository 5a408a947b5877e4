#!/usr/bin/env bash
# Scenario: inline volumes of deploy/examples/inline and deploy/inline; a changed Secret reaches a running pod
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"
namespace=inline-demo

quietly kubectl apply --server-side -k deploy/examples/inline
await condition=Ready -n "$namespace" pod/scratch pod/content
rollout "$namespace" deployment/workers
step "a filesystem of the requested kind, and files"
in_pod scratch 'echo written >/scratch/file; grep -q " /scratch xfs " /proc/mounts'
equal "the file" "colour = blue" "$(in_pod content 'cat /etc/settings/app.conf')"
equal "the secret" not-a-real-token "$(in_pod content 'cat /etc/settings/token')"
step "the Secret changes"
quietly kubectl -n "$namespace" patch secret credentials --type merge -p '{"stringData": {"token": "another"}}'
has_changed() { [[ $(in_pod content 'cat /etc/settings/token') == another ]]; }
eventually has_changed
step "the volumes go with their pods"
delete -k deploy/examples/inline
inline_volumes() { on_node grep -c 'kubernetes.io~csi/\(scratch\|settings\|cache\)/' /proc/self/mountinfo; }
equal "mounts of inline volumes" 0 "$(inline_volumes || true)"
step "the driver for every node (deploy/inline)"
quietly kubectl apply --server-side -k deploy/inline
rollout csi-loopback-inline daemonset/csi-loopback-inline
apply <<END
apiVersion: v1
kind: Pod
metadata: {name: inline-everywhere, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: csi-loopback:0.1.0
      command: [sleep, infinity]
      volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes:
    - name: scratch
      csi: {driver: inline.loopback.csi.local, volumeAttributes: {size: 64Mi}}
END
namespace=default
await condition=Ready -n default pod/inline-everywhere
in_pod inline-everywhere 'echo written >/scratch/file; grep -q " /scratch ext4 " /proc/mounts'
delete -n default pod/inline-everywhere
delete -k deploy/inline
on_node rm -r /var/lib/csi-loopback-inline /var/lib/kubelet/plugins/inline.loopback.csi.local
