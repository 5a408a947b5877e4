#!/usr/bin/env bash
# hack/cluster.sh DIR: runs a released Kubernetes API server on this machine, with etcd, the
# snapshot-controller, RBAC, ServiceAccount tokens and the aggregation layer. Without nodes and
# without kube-controller-manager: pods do not start, claims are not bound, and namespaces are not
# deleted.
#
# Runs until SIGTERM or SIGINT, or until its parent ends, and then stops everything that it started.
# It creates DIR with
#   ready       created when all programs are ready; use nothing before
#   kubeconfig  of the administrator
#   tools/      kube-apiserver, etcd, kubectl, csi-snapshotter, … (hack/lib.sh, kubernetes_tools)
#   pki/        ca.crt, ca.key, sa.key (signs ServiceAccount tokens), and other keys
#   restart     created by a test: the API server is restarted when it ends, once per file
#   *.log       one per program; requests.log has every request to the API server, one JSON object per line
#               (audit.k8s.io/v1 Event of level Metadata, without bodies)
#
# KUBEBUILDER_ASSETS        directory of kube-apiserver, etcd and kubectl, instead of the built ones
# CSI_LOOPBACK_KUBERNETES   directory of the tools (default: build them, which takes minutes once)
#
# Exits with 77 if the tools are not available; the last line of stderr gives the reason.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/parts.sh
source "$(dirname "$0")/parts.sh"
# shellcheck source=hack/kubernetes.sh
source "$(dirname "$0")/kubernetes.sh"

(($# == 1)) || die "usage: hack/cluster.sh DIR"
umask 077
mkdir -p "$1"
dir=$(realpath "$1")
pki=$dir/pki tools=$dir/tools
((${#dir} <= 90)) || die "$dir: path too long; the path of a unix socket has at most 107 bytes"
[[ ! -e $dir/kubeconfig ]] || die "$dir: already has a cluster; use a new directory"

api_port=

cleanup() { # cleanup STATUS: stops everything that was started, and exits with STATUS
    # A second interrupt must not stop the cleanup.
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    rm -f "$dir/ready"
    # Killed, because their data is not needed. The API server before etcd: otherwise it logs that
    # etcd ended.
    local name
    for name in snapshot-controller kube-apiserver etcd; do
        [[ -z ${pid_of[$name]:-} ]] || kill -KILL "${pid_of[$name]}" 2>/dev/null
    done
    wait 2>/dev/null
    exit "$1"
}
trap 'cleanup $?' EXIT
trap 'cleanup 0' INT TERM HUP

# --- Requirements ---------------------------------------------------------------------------------

install_missing openssl setpriv setsid >&2 || exit 77
built=$(kubernetes_tools) || exit 77
mkdir "$dir/tools"
ln -s "$built"/* "$dir/tools/"
if [[ -n ${KUBEBUILDER_ASSETS:-} ]]; then
    for name in kube-apiserver etcd kubectl; do
        [[ -x $KUBEBUILDER_ASSETS/$name ]] || die "KUBEBUILDER_ASSETS: $name is missing in $KUBEBUILDER_ASSETS"
        ln -sfn "$(realpath "$KUBEBUILDER_ASSETS/$name")" "$dir/tools/$name"
    done
fi

# --- Certificates ---------------------------------------------------------------------------------

mkdir "$pki"

# Webhooks that are called by URL get a certificate of another authority than that of the aggregation layer.
{ make_cluster_pki "" && make_certificate webhook-client ca /CN=webhook-client clientAuth; } >"$dir/pki.log" 2>&1 ||
    give_up pki "could not be created"

# --- etcd -----------------------------------------------------------------------------------------

start_etcd "$dir" "$dir/etcd"

# --- The API server -------------------------------------------------------------------------------

# example KIND: the YAML of this kind in the guide about client certificates, with the paths of this cluster.
example() {
    awk -v kind="kind: $1" '
        /^```yaml$/ { inside = 1; text = ""; next }
        /^```$/ { if (inside && index(text, "\n" kind "\n")) printf "%s", text; inside = 0 }
        inside { text = text $0 "\n" }' "$repo/docs/guide/api-server-certificate.md" |
        sed "s~/etc/kubernetes/pki/front-proxy-client~$pki/front-proxy~; s~/etc/kubernetes/pki~$dir~"
}

write_admission_configuration() {
    example Config >"$dir/webhook-clients.yaml"
    # Webhooks that are called by URL get a certificate of another authority.
    cat >>"$dir/webhook-clients.yaml" <<END
  - name: "*"
    user: {client-certificate: $pki/webhook-client.crt, client-key: $pki/webhook-client.key}
END
    example AdmissionConfiguration >"$dir/admission.yaml"
}

start_api_server() {
    # Below the ephemeral ports. A restarted API server keeps its port.
    local port=${api_port:=$((20000 + SRANDOM % 12000))}
    local flags=(
        --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$port"
        --cert-dir="$dir"
        # No client uses its Service, and 127.0.0.1 is not valid as an endpoint.
        --endpoint-reconciler-type=none --service-cluster-ip-range=10.0.0.0/24
        --authorization-mode=RBAC --service-account-issuer=https://kubernetes.default.svc
        # No controller removes the finalizers of this plugin: deletions would not end.
        --disable-admission-plugins=StorageObjectInUseProtection
        --audit-policy-file="$dir/audit.yaml" --audit-log-path="$dir/requests.log"
        # A client certificate for webhooks, which few of them require.
        --admission-control-config-file="$dir/admission.yaml"
    )
    write_admission_configuration
    # One event per request, when its response is complete.
    cat >"$dir/audit.yaml" <<END
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: Metadata
END
    rm -f "$dir/kube-apiserver.log"
    start_kube_apiserver "$dir" "${flags[@]}"
    write_kubeconfig "$dir/kubeconfig" "https://127.0.0.1:$port" admin
}

kubectl() { "$dir/tools/kubectl" --kubeconfig "$dir/kubeconfig" --cache-dir "$dir/cache" "$@"; }

# api_server_is_ready: whether /readyz succeeds. Restarts the API server if another process uses its
# port.
api_server_is_ready() {
    if ! kill -0 "${pid_of[kube-apiserver]}" 2>/dev/null &&
        grep -q 'address already in use' "$dir/kube-apiserver.log"; then
        api_port=
        start_api_server
    fi
    kubectl --request-timeout=5s get --raw /readyz
}

start_api_server
await kube-apiserver api_server_is_ready

# --- Definitions, and the snapshot-controller -----------------------------------------------------

ours=$repo/deploy/crds
definitions=()
for file in "$dir/tools/crds/external-snapshotter"/*.yaml "$ours"{,-upstream}/*.yaml; do
    [[ ${file##*/} == kustomization.yaml ]] || definitions+=(-f "$file")
done
kubectl create "${definitions[@]}" >"$dir/definitions.log" 2>&1 || give_up definitions "were rejected"
kubectl wait --for=condition=Established --timeout="${patience}s" "${definitions[@]}" \
    >>"$dir/definitions.log" 2>&1 || give_up definitions "were not established"

start snapshot-controller tools/snapshot-controller --kubeconfig="$dir/kubeconfig" --kube-api-qps=100 --kube-api-burst=200 \
    --retry-interval-start=200ms
await snapshot-controller grep -q 'Starting snapshot controller' "$dir/snapshot-controller.log"

# --- Until the end --------------------------------------------------------------------------------

: >"$dir/ready"
printf 'ready after %d s: export KUBECONFIG=%s\n' "$SECONDS" "$dir/kubeconfig"
until orphaned; do
    sleep 1 &
    wait -n || true
    for name in "${!pid_of[@]}"; do
        kill -0 "${pid_of[$name]}" 2>/dev/null && continue
        [[ $name == kube-apiserver && -e $dir/restart ]] || give_up "$name" "ended unexpectedly"
        rm "$dir/restart"
        start_api_server
    done
done
