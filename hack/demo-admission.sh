#!/usr/bin/env bash
# hack/demo-admission.sh: the admission webhooks for inline volumes, on one machine with a real API server. Starts a cluster without
# nodes (hack/cluster.sh) and the webhooks, with the rights that deploy/admission gives them; shows a pod whose volume of
# read-only content is made so on the way in, one that a policy refuses, a template that is warned of, and pods of others
# that go on when nobody answers. What the driver itself does with such volumes: hack/demo-inline.sh. Leaves nothing behind,
# also when it is interrupted.
#
# CSI_LOOPBACK_BIN      the binary to show; without it, the one of this tree is built
# Needs root. The first run builds the parts of Kubernetes, which takes minutes.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"
# shellcheck source=hack/cluster-stage.sh
source "$(dirname "$0")/cluster-stage.sh"

# Where the pods are, and what is installed for the webhooks.
namespace=inline-demo
webhooks=csi-loopback-admission

# There is no driver here, so that there is no volume.
take_down() { :; }

# What deploy/ has, but for pods, which nobody starts here: the webhooks run beside this script.
install() {
    tell kubectl apply --server-side -f deploy/base/csi-driver.yaml
    kubectl apply --server-side -f "$repo/deploy/base/csi-driver.yaml"
    tell kubectl apply --server-side -k deploy/admission
    kubectl apply --server-side -k "$repo/deploy/admission"
    kubectl create namespace "$namespace"
    kubectl -n "$namespace" create serviceaccount default
}

# With the flags of deploy/admission. The API server, which is no pod here, calls the webhooks by URL.
start_webhooks() {
    local port http kind index=0 path
    port=$(free_port) http=$(free_port)
    for path in mutate-pod validate-pod validate-workload; do
        kind=validatingwebhookconfiguration
        [[ $path != mutate-pod ]] || kind=mutatingwebhookconfiguration
        [[ $path != validate-workload ]] || index=1
        kubectl patch "$kind" "$webhooks" --type=json -p '[{"op": "replace", "path":
            "/webhooks/'$index'/clientConfig", "value": {"url": "https://localhost:'"$port/$path"'"}}]' >>"$tmp/install.log"
    done
    kubeconfig_of "$webhooks" "$webhooks"
    start admission "$driver" --mode admission --port "$port" --http-endpoint ":$http" --self-signed \
        --self-signed-secret "$webhooks-tls" --service-address "localhost:$port" --namespace "$webhooks" \
        --kubeconfig "$tmp/$webhooks.kubeconfig"
    until_so 60 "the webhooks" healthy "$port" "$http"
    # They publish whom to trust, and the API server learns of that, each of both configurations for itself.
    pod probe >"$tmp/probe.yaml"
    until_so 60 "trust in the webhooks" kubectl create --dry-run=server -f "$tmp/probe.yaml"
    pod probe 'fromSnapshot: none' >"$tmp/probe.yaml"
    until_so 60 "a policy that is known" denied "$tmp/probe.yaml"
}

denied() { [[ $(kubectl create --dry-run=server -f "$1" 2>&1) == *'denied the request'* ]]; }

pod() { # pod NAME ATTRIBUTE...: one with an inline volume of these attributes, which says nothing of reading or writing
    local name=$1 attribute
    shift
    cat <<END
apiVersion: v1
kind: Pod
metadata: {name: $name, namespace: $namespace}
spec:
  containers:
  - {name: app, image: "app:1", volumeMounts: [{name: data, mountPath: /data}]}
  volumes:
  - name: data
    csi:
      driver: $driver_name
END
    (($# == 0)) || echo "      volumeAttributes:"
    for attribute; do
        echo "        $attribute"
    done
}

deployment() { # deployment NAME ATTRIBUTE...: of such pods
    cat <<END
apiVersion: apps/v1
kind: Deployment
metadata: {name: $1, namespace: $namespace}
spec:
  selector: {matchLabels: {app: $1}}
  template:
    metadata: {labels: {app: $1}}
END
    pod "$@" | sed '1,/^spec:/d' | sed '1i spec:' | sed 's/^/    /'
}

create() { # create FILE: as a user would, told with the file
    sed 's/^/    /' "$tmp/$1"
    tell kubectl create -f "$1"
    kubectl create -f "$tmp/$1" 2>&1 | sed "s|$tmp|\$tmp|g; s/^/    /"
}

refused() { # refused WORDS FILE: what has to be refused, with these words
    if create "$2" >"$tmp/refusal"; then
        die "it was not refused: $(<"$tmp/refusal")"
    fi
    cat "$tmp/refusal"
    grep -F -- "$1" "$tmp/refusal" >/dev/null || die "refused, but not with: $1"
}

begin_demo setsid jq curl

say "starting an API server and etcd, in \$tmp ($tmp), and the webhooks"
start_cluster
install | sed 's/^[^ ]/    &/'
start_webhooks

say "a pod whose volume is content: it says nothing of reading or writing"
pod content 'content/app.conf: colour=blue' >"$tmp/content.yaml"
create content.yaml
say "on the way in its volume and the mounts of it were made read-only"
tell kubectl -n "$namespace" get pod content
# shellcheck disable=SC2016 # jq's
made=$(kubectl -n "$namespace" get pod content -o json | jq -c \
    '{volume: .spec.volumes[0].csi.readOnly, mount: .spec.containers[0].volumeMounts[0].readOnly}')
printf '    readOnly: %s\n' "$made"
[[ $made == '{"volume":true,"mount":true}' ]] || die "they were not"

say "one that is written to is left as it is"
pod scratch 'size: 64Mi' >"$tmp/scratch.yaml"
create scratch.yaml
[[ $(kubectl -n "$namespace" get pod scratch -o 'jsonpath={.spec.volumes[0].csi.readOnly}') != true ]] || die "it was changed"

say "a snapshot's data is for nobody, unless the policy says otherwise"
pod thief 'fromSnapshot: snap-a-0123456789abcdef' >"$tmp/thief.yaml"
refused fromSnapshot thief.yaml

say "the policy of the namespace changes: at most 32Mi"
policy="namespaces: {$namespace: {maxSize: 32Mi}}"
tell kubectl -n "$webhooks" patch configmap "$webhooks", policy.yaml: "$policy"
kubectl -n "$webhooks" patch configmap "$webhooks" --type=merge -p "$(jq -cn --arg policy "$policy" \
    '{data: {"policy.yaml": $policy}}')" | sed 's/^/    /'
pod large 'size: 64Mi' >"$tmp/large.yaml"
until_so 30 "the new policy" denied "$tmp/large.yaml"
refused size large.yaml

say "who writes a template is warned early"
deployment workers 'size: 64Mi' >"$tmp/workers.yaml"
create workers.yaml | tee "$tmp/warned"
grep -F 'Warning:' "$tmp/warned" >/dev/null || die "nobody was warned"

say "while nobody answers, pods with such volumes wait, and all others go on"
stop "$started" 30
unset 'running[-1]'
pod late >"$tmp/late.yaml"
refused "failed calling webhook" late.yaml
sed '/^  volumes:/,$d; s/, volumeMounts: .*}/}/' "$tmp/late.yaml" >"$tmp/other.yaml"
create other.yaml

say "taking everything down"
end_demo
