# shellcheck shell=bash disable=SC2154
# Scene: the webhooks for such pods: what they set, refuse and warn of

namespace=inline-demo
webhooks=csi-loopback-admission
examples=$repo/deploy/examples/inline

create() { # create FILE FLAG...
    kubectl -n "$namespace" create -f "$@"
}

scratch() { # scratch NAME ATTRIBUTE: writes NAME.yaml, the pod of the example with another attribute
    sed "s/^  name: scratch/  name: $1/; s/size: .*/$2/" "$examples/scratch.yaml" >"$1.yaml"
}

denied() { [[ $(create "$1" --dry-run=server 2>&1) == *'denied the request'* ]]; }

begin curl
start_cluster
apply base admission
create "$examples/namespace.yaml" >>"$tmp/apply.log"
say "starting the webhooks"
free_ports
call_by_url "$webhooks"
start_server "$webhooks" "deployment/$webhooks" admission
# The API server learns of each configuration's authority on its own.
scratch probe 'size: 64Mi'
await "trust in the webhooks" create probe.yaml --dry-run=server
scratch thief 'fromSnapshot: snap-a-0123456789abcdef'
await "the policy" denied thief.yaml

say "a pod whose volume is content, and which does not say readOnly"
sed '/^ *readOnly: true/d' "$examples/content.yaml" >content.yaml
shell create content.yaml
say "the webhook has set it, for the volume and its mount"
# shellcheck disable=SC2016 # jq's
set_to=$(kubectl -n "$namespace" get pod content -o json |
    jq -c '[.spec.volumes[0].csi.readOnly, .spec.containers[0].volumeMounts[0].readOnly]')
printf '    readOnly: %s\n' "$set_to"
[[ $set_to == '[true,true]' ]] || die "it has not"

say "a pod that writes is left as it is"
shell create "$examples/scratch.yaml"
[[ $(kubectl -n "$namespace" get pod scratch -o 'jsonpath={.spec.volumes[0].csi.readOnly}') != true ]] || die "it was changed"

say "data of a snapshot is refused, unless the policy allows it"
refused fromSnapshot create thief.yaml

say "the policy of the namespace changes: at most 32Mi"
shell kubectl -n "$webhooks" patch configmap "$webhooks" --type=merge \
    -p '{"data": {"policy.yaml": "namespaces: {inline-demo: {maxSize: 32Mi}}"}}'
scratch large 'size: 64Mi'
await "the new policy" denied large.yaml
refused size create large.yaml
say "a template with such a pod is accepted with a warning"
shell create "$examples/deployment.yaml" | tee warned
grep -qF 'Warning:' warned || die "there is no warning"

say "without the webhooks, pods with such volumes wait, and all others are created"
stop_started admission
refused "failed calling webhook" create probe.yaml
sed 's/name: probe/name: other/; /volumeMounts:/,/mountPath/d; /^  volumes:/,$d' probe.yaml >other.yaml
shell create other.yaml
say "taking everything down"
