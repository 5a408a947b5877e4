# shellcheck shell=bash disable=SC2034,SC2154
# Scene: the webhooks for pods with inline volumes: changes and rejections

namespace=inline-demo
webhooks=csi-loopback-admission
examples=$repo/deploy/examples/inline

scratch() { # scratch NAME ATTRIBUTE: writes NAME.yaml, the pod of the example with another ATTRIBUTE
    sed "s/^  name: scratch/  name: $1/; s/size: .*/$2/" "$examples/scratch.yaml" >"$1.yaml"
}

is_denied() { [[ $(kubectl create --dry-run=server -f "$1" 2>&1) == *'denied the request'* ]]; }

begin
start_cluster
apply base admission
quietly kubectl create -f "$examples/namespace.yaml"
say "starting the webhooks"
port=$(free_port)
call_by_url "$port"
start_role "$webhooks" "deployment/$webhooks" admission "--port=$port"
# The API server loads the CA bundle of each webhook configuration separately.
scratch probe 'size: 64Mi'
await "trust in the webhooks" kubectl create --dry-run=server -f probe.yaml
scratch wrong 'sise: 64Mi'
await "the policy" is_denied wrong.yaml
say "creating a pod with a content volume without readOnly; the webhook sets readOnly"
sed '/^ *readOnly: true/d' "$examples/content.yaml" >content.yaml
shell kubectl create -f content.yaml
read_only=$(kubectl get pod content -o json |
    jq -c '[.spec.volumes[0].csi.readOnly, .spec.containers[0].volumeMounts[0].readOnly]')
echo "    readOnly of the volume and of its mount: $read_only"
[[ $read_only == '[true,true]' ]] || die "readOnly was not set"
say "the webhook does not change a pod with a scratch volume"
shell kubectl create -f "$examples/scratch.yaml"
[[ $(kubectl get pod scratch -o 'jsonpath={.spec.volumes[0].csi.readOnly}') != true ]] || die "readOnly was set"
say "the webhook rejects an unknown attribute and names it"
rejected sise kubectl create -f wrong.yaml
say "changing the policy of the namespace: at most 32Mi"
shell kubectl -n "$webhooks" patch configmap "$webhooks" --type=merge \
    -p '{"data": {"policy.yaml": "namespaces: {inline-demo: {maxSize: 32Mi}}"}}'
await "the new policy" is_denied probe.yaml
rejected size kubectl create -f probe.yaml
say "stopping the webhooks: pods with inline volumes are rejected, other pods are created"
stop admission
rejected "failed calling webhook" kubectl create -f probe.yaml
sed '/volumeMounts:/,/mountPath/d; /^  volumes:/,$d' probe.yaml >other.yaml
shell kubectl create -f other.yaml
say "stopping everything"
