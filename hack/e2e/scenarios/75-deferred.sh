#!/usr/bin/env bash
# Scenario: the node proxy defers the volumes of an annotated pod, claims included, to its runtime
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"
namespace=node-proxy-demo

step "the runtime's program and containerd's handler on the node (deploy/runtime)"
on_node mkdir -p /usr/local/bin /etc/csi-loopback /etc/containerd
kubectl -n backup-client exec client -- cat /csi-loopback | on_node tee /usr/local/bin/csi-loopback >/dev/null
on_node chmod 755 /usr/local/bin/csi-loopback
on_node ln -sfn csi-loopback /usr/local/bin/csi-loopback-runc
on_node tee /etc/csi-loopback/oci-runtime.yaml <deploy/runtime/oci-runtime.yaml >/dev/null
# This node has no systemd.
sed 's/SystemdCgroup = true/SystemdCgroup = false/' deploy/runtime/containerd.toml |
    on_node tee /etc/containerd/handler.toml >/dev/null
restart containerd
step "admission webhooks and node proxy (deploy/admission, deploy/node-proxy)"
quietly kubectl apply --server-side -k deploy/admission
rollout csi-loopback-admission deployment/csi-loopback-admission
# The entries that deploy/admission/objects.yaml shows in comments.
policy=$(kubectl -n csi-loopback-admission get configmap csi-loopback-admission -o jsonpath='{.data.policy\.yaml}' |
    awk '/^deferral:/ { print "deferral:"; shown = 1; next } shown && /^#  / { print substr($0, 2); next } { shown = 0; print }')
quietly kubectl -n csi-loopback-admission patch configmap csi-loopback-admission --type merge \
    --patch "$(jq -n --arg policy "$policy" '{data: {"policy.yaml": $policy}}')"
quietly kubectl apply --server-side -k "$(overlay_of node-proxy node-proxy cbt-http)"
rollout csi-loopback daemonset/csi-loopback-node-proxy daemonset/csi-loopback-runtime-ops statefulset/csi-loopback
step "a pod that opts in (deploy/examples/node-proxy)"
eventually kubectl apply --server-side -k deploy/examples/node-proxy
await condition=Ready -n "$namespace" pod/app
# shellcheck disable=SC2016 # for the shell in the pod
in_pod app 'for at in /data /cache /scratch; do grep -q "^/dev/loop[0-9]* $at " /proc/mounts; echo written >$at/file; done; sync'
host_mounts() { on_node grep -c "^/dev/loop[0-9]* /var/lib/kubelet/pods/$1/" /proc/mounts || true; }
uid=$(kubectl -n "$namespace" get pod app -o jsonpath='{.metadata.uid}')
equal "mounts of the pod's volumes on the node" 0 "$(host_mounts "$uid")"
step "a new pod finds the data of the claim"
delete -n "$namespace" pod/app
quietly kubectl apply --server-side -k deploy/examples/node-proxy
await condition=Ready -n "$namespace" pod/app
equal "the file" written "$(in_pod app 'cat /data/file')"
step "pods that the policy opts in (deploy/examples/runtime)"
quietly kubectl apply --server-side -k deploy/examples/runtime
namespace=runtime-demo
await condition=Ready -n "$namespace" pod/claim pod/inline
in_pod claim 'echo written >/data/file; echo written >/cache/file; test -e /data/cache/file'
in_pod inline 'echo written >/scratch/file'
for pod in claim inline; do
    uid=$(kubectl -n "$namespace" get pod "$pod" -o jsonpath='{.metadata.uid}')
    equal "mounts of the pod's volumes on the node" 0 "$(host_mounts "$uid")"
done
delete -k deploy/examples/runtime
step "removal by docs/guide/install.md; deploy/base again"
delete -k deploy/examples/node-proxy
quietly kubectl apply --server-side -k "$overlay/base"
delete -k deploy/node-proxy/proxy
delete -n csi-loopback daemonset/csi-loopback-runtime-ops
delete runtimeclass/csi-loopback
on_node rm -r /var/lib/csi-loopback-node-proxy
delete mutatingwebhookconfiguration,validatingwebhookconfiguration csi-loopback-admission
delete -k deploy/admission
rollout csi-loopback statefulset/csi-loopback
