#!/usr/bin/env bash
# hack/cluster.sh DIR: a Kubernetes API server on this machine, with etcd and the snapshot-controller, as they
# are released; with RBAC, ServiceAccount tokens and the aggregation layer, without nodes and without the
# controllers of Kubernetes: no pod starts, no claim is bound, no namespace ever ends.
#
# Runs until SIGTERM or SIGINT, or until its parent has gone, and then ends all that it has started. DIR
# is made if it is not there; afterwards it holds
#   ready       when all of it answers; until then nothing is to be used
#   kubeconfig  the administrator's
#   tools/      kube-apiserver, etcd, kubectl, csi-snapshotter, … (hack/lib.sh, kubernetes_tools)
#   pki/        ca.crt, ca.key, sa.key, which signs ServiceAccounts' tokens, and the rest
#   restart     where a test puts it, an API server that ends is started again
#   *.log       one for each part; requests.log has every request to the API server, one JSON object a line
#               (audit.k8s.io/v1 Event, of level Metadata: without bodies)
#
# KUBEBUILDER_ASSETS        where kube-apiserver, etcd and kubectl are, instead of those built here
# CSI_LOOPBACK_KUBERNETES   where the tools are (built if it is not set, which takes minutes once)
#
# Exits with 77 when the tools cannot be had; the last line of stderr says why.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/parts.sh
source "$(dirname "$0")/parts.sh"

(($# == 1)) || die "usage: hack/cluster.sh DIR"
umask 077
mkdir -p "$1"
dir=$(realpath "$1")
pki=$dir/pki
((${#dir} <= 90)) || die "$dir: too long, a socket's path has room for 107 bytes"
[[ ! -e $dir/kubeconfig ]] || die "$dir: there is or was a cluster already"

api_port=

cleanup() { # cleanup STATUS: ends what was started and exits with that
    # A second interrupt must not stop what undoes the first.
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    rm -f "$dir/ready"
    # Nobody needs what they hold, so nobody waits for them to put it away. The API server goes first:
    # it would only tell of etcd's end.
    local name
    for name in snapshot-controller kube-apiserver etcd; do
        [[ -z ${pid_of[$name]:-} ]] || kill -KILL "${pid_of[$name]}" 2>/dev/null
    done
    wait 2>/dev/null
    exit "$1"
}
trap 'cleanup $?' EXIT
trap 'cleanup 0' INT TERM HUP

# --- What is needed -------------------------------------------------------------------------------

install_missing openssl setpriv setsid >&2 || exit 77
built=$(kubernetes_tools) || exit 77
mkdir "$dir/tools"
ln -s "$built"/* "$dir/tools/"
if [[ -n ${KUBEBUILDER_ASSETS:-} ]]; then
    for name in kube-apiserver etcd kubectl; do
        [[ -x $KUBEBUILDER_ASSETS/$name ]] || die "KUBEBUILDER_ASSETS: there is no $name in it"
        ln -sfn "$(realpath "$KUBEBUILDER_ASSETS/$name")" "$dir/tools/$name"
    done
fi

# --- Certificates ---------------------------------------------------------------------------------

mkdir "$pki"

make_ca() { # make_ca NAME
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -keyout "$pki/$1.key" -out "$pki/$1.crt" -subj "/CN=$1"
}

make_certificate() { # make_certificate NAME CA SUBJECT USAGE [NAMES]
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -CA "$pki/$2.crt" -CAkey "$pki/$2.key" -keyout "$pki/$1.key" -out "$pki/$1.crt" -subj "$3" \
        -addext "basicConstraints=critical,CA:FALSE" -addext "extendedKeyUsage=$4" \
        ${5:+-addext "subjectAltName=$5"}
}

make_pki() {
    # The aggregation layer has an authority of its own: who holds a certificate of it may speak for
    # anybody.
    make_ca ca && make_ca front-proxy-ca &&
        make_certificate apiserver ca /CN=kube-apiserver serverAuth \
            "DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1" &&
        make_certificate admin ca /O=system:masters/CN=admin clientAuth &&
        make_certificate front-proxy front-proxy-ca /CN=front-proxy clientAuth &&
        openssl genrsa -out "$pki/sa.key" 2048 &&
        openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub"
}
# What is called behind a || goes on after errors: hence the chain above.
make_pki >"$dir/pki.log" 2>&1 || give_up pki "cannot be made"

write_kubeconfig() { # write_kubeconfig PORT
    cat >"$dir/kubeconfig" <<END
apiVersion: v1
kind: Config
clusters:
- name: local
  cluster:
    server: https://127.0.0.1:$1
    certificate-authority-data: $(base64 -w0 <"$pki/ca.crt")
users:
- name: admin
  user:
    client-certificate-data: $(base64 -w0 <"$pki/admin.crt")
    client-key-data: $(base64 -w0 <"$pki/admin.key")
contexts:
- name: local
  context: {cluster: local, user: admin}
current-context: local
END
}

# --- etcd -----------------------------------------------------------------------------------------

# On sockets in DIR, which nobody else can open and no port has to be found for; their names have to look
# as if there were one.
start etcd tools/etcd --name=local --data-dir=etcd --unsafe-no-fsync --log-level=warn \
    --listen-client-urls=unix://client:0 --advertise-client-urls=unix://client:0 \
    --listen-peer-urls=unix://peer:0 --initial-advertise-peer-urls=unix://peer:0 \
    --initial-cluster=local=unix://peer:0
# The API server tries again after seconds only.
await etcd test -S "$dir/client:0"

# --- The API server -------------------------------------------------------------------------------

start_api_server() {
    # Below those that the kernel gives away by itself. One that is started again is where it was.
    local port=${api_port:=$((20000 + SRANDOM % 12000))}
    local flags=(
        --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$port"
        --cert-dir="$dir" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key"
        --etcd-servers="unix://$dir/client:0"
        # Nothing reaches it through its Service, and 127.0.0.1 may not be an endpoint.
        --endpoint-reconciler-type=none --service-cluster-ip-range=10.0.0.0/24
        --client-ca-file="$pki/ca.crt" --authorization-mode=RBAC
        --service-account-issuer=https://kubernetes.default.svc
        --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key"
        # Its finalizers are taken away by a controller that does not run: nothing could be deleted.
        --disable-admission-plugins=StorageObjectInUseProtection
        --allow-privileged=true
        --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy
        --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group
        --requestheader-username-headers=X-Remote-User
        --proxy-client-cert-file="$pki/front-proxy.crt" --proxy-client-key-file="$pki/front-proxy.key"
        # No Service's address leads anywhere on this machine: an APIService names one of type ExternalName, which the
        # API server resolves itself as long as it does not look for endpoints (--enable-aggregator-routing).
        --audit-policy-file="$dir/audit.yaml" --audit-log-path="$dir/requests.log"
        --profiling=false
    )
    # Each request once, when it is answered.
    cat >"$dir/audit.yaml" <<END
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: Metadata
END
    rm -f "$dir/kube-apiserver.log"
    start kube-apiserver tools/kube-apiserver "${flags[@]}"
    write_kubeconfig "$port"
}

kubectl() { "$dir/tools/kubectl" --kubeconfig "$dir/kubeconfig" --cache-dir "$dir/cache" "$@"; }

# api_server_answers: whether it is ready. Starts it anew when another process had its port.
api_server_answers() {
    if ! kill -0 "${pid_of[kube-apiserver]}" 2>/dev/null &&
        grep -q 'address already in use' "$dir/kube-apiserver.log"; then
        api_port=
        start_api_server
    fi
    kubectl --request-timeout=5s get --raw /readyz
}

start_api_server
await kube-apiserver api_server_answers

# --- Definitions, and the snapshot-controller -----------------------------------------------------

ours=$repo/deploy/crds
# Without definitions of ours, those that the released sidecar comes with.
[[ -d $ours ]] || ours=$dir/tools/crds/external-snapshot-metadata
definitions=()
for file in "$dir/tools/crds/external-snapshotter"/*.yaml "$ours"/*.yaml; do
    [[ ${file##*/} == kustomization.yaml ]] || definitions+=(-f "$file")
done
kubectl create "${definitions[@]}" >"$dir/definitions.log" 2>&1 || give_up definitions "are refused"
kubectl wait --for=condition=Established --timeout="${patience}s" "${definitions[@]}" \
    >>"$dir/definitions.log" 2>&1 || give_up definitions "are not established"

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
        [[ $name == kube-apiserver && -e $dir/restart ]] || give_up "$name" "has ended"
        rm "$dir/restart"
        start_api_server
    done
done
