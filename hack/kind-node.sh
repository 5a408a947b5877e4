#!/usr/bin/env bash
# hack/kind-node.sh [IMAGE:TAG]: builds a node image for kind from Debian packages and Go modules, and loads it into docker, for
# machines that cannot pull kindest/node. It takes the files of kind's base image from kind's module, and contains the
# images of all pods of hack/kind-demo.sh except csi-loopback. The last line of output is the command that uses it.
#
# It is for clusters of one node: a fixed CNI configuration replaces kindnetd, whose module cannot be downloaded, and
# there is no local-path-provisioner. Node-driver-registrar and livenessprobe are stand-ins, as in hack/e2e.sh.
#
# Needs root, and a Docker daemon. IMAGE:TAG is csi-loopback-node:latest by default.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/e2e/cluster.sh
source "$repo/hack/e2e/cluster.sh"

handle_help "$@"
image=${1:-csi-loopback-node:latest}

# kubernetes_images: builds the images that kubeadm's manifests name.
kubernetes_images() {
    local required name images
    images=$("$kind_tools/kubeadm" config images list --kubernetes-version "$version") || return 1
    while read -r required; do
        name=${required##*/}
        name=${name%%:*}
        case $name in
        pause) pause_image "$(sed -n 's/^ *sandbox_image = "\(.*\)"/\1/p' "$base/etc/containerd/config.toml")" ;;
        kube-proxy) proxy_image "$required" ;;
        *) program_image "$e2e/tools/$name" "$required" "$name" ;;
        esac
    done <<<"$images"
}

# proxy_image IMAGE: kube-proxy runs the programs of iptables and nftables.
proxy_image() {
    install -D -m 755 "$e2e/tools/kube-proxy" "$e2e/proxy/usr/local/bin/kube-proxy"
    oci_layer "$e2e/proxy" "$e2e/layer"
    oci_image "$e2e/images/kube-proxy.tar" "$1" \
        '{"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}' "$debian" "$e2e/layer"
    rm -r "$e2e/proxy" "$e2e/layer"
}

# base_image: what the Dockerfile of kind's base image does, with containerd and runc of Debian.
base_image() {
    mkdir -p "$tree/dev"
    tar --extract --file="$debian" --directory="$tree"
    cp -r --no-preserve=mode,ownership "$base"/. "$tree"
    chmod 755 "$tree"/usr/local/bin/* "$tree"/kind/bin/*
    ln -s /usr/bin/containerd "$tree/usr/local/bin/containerd"
    ln -sf /usr/lib/systemd/systemd "$tree/sbin/init"
    rm -f "$tree"/{etc,usr/lib}/systemd/system/{multi-user,local-fs,basic}.target.wants/* \
        "$tree"/usr/lib/systemd/system/sockets.target.wants/*{udev,initctl}* \
        "$tree"/usr/lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service
    mkdir -p "$tree/etc/kubernetes/manifests" "$tree/etc/systemd/journald.conf.d"
    printf '[Journal]\nReadKMsg=no\n' >"$tree/etc/systemd/journald.conf.d/kind.conf"
    # Lowering it needs CAP_SYS_RESOURCE, which root may lack.
    sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$tree/etc/containerd/config.toml"
}

# node_image: adds what "kind build node-image" adds to the base image.
node_image() {
    install -m 755 -t "$tree/usr/bin" "$e2e/tools"/{kubelet,kubectl} "$kind_tools/kubeadm"
    install -m 755 -t "$tree/usr/local/bin" "$kind_tools/crictl"
    # Where containerd of Debian looks for them.
    install -D -m 755 -t "$tree/usr/lib/cni" "$e2e/tools"/{host-local,loopback,ptp}
    mkdir -p "$tree/etc/cni/net.d" "$tree/kind/manifests"
    printf %s "$version" >"$tree/kind/version"
    # The first subnet of kind's pods, which the only node gets.
    cat >"$tree/etc/cni/net.d/10-ptp.conflist" <<'END'
{"cniVersion": "1.0.0", "name": "kind", "plugins": [{"type": "ptp", "ipam": {"type": "host-local",
 "dataDir": "/run/cni-ipam-state", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    # kind fails without a manifest.
    cat >"$tree/kind/manifests/default-cni.yaml" <<'END'
apiVersion: v1
kind: ConfigMap
metadata: {name: cni, namespace: kube-system}
data: {configuration: /etc/cni/net.d/10-ptp.conflist of the node image}
END
}

# in_tree SCRIPT: runs a script with the tree as its root. Its processes and mounts end with it.
in_tree() { unshare --mount --pid --fork --kill-child --root="$tree" --mount-proc bash -euc "$1"; }

# shellcheck disable=SC2016 # for the shell in the tree
finish='
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    mount -t tmpfs tmpfs /run
    mount -t tmpfs tmpfs /dev
    mknod -m 666 /dev/null c 1 3
    mknod -m 666 /dev/urandom c 1 9
    ctr oci spec | jq ".hooks.createContainer += [{path: \"/kind/bin/mount-product-files.sh\"}] | del(.process.rlimits)" \
        >/etc/containerd/cri-base.json
    systemctl enable kubelet.service containerd.service undo-mount-hacks.service
    systemctl mask systemd-binfmt.service
    containerd >/tmp/containerd.log 2>&1 &
    pid=$!
    for _ in {1..100}; do ! ctr version >/dev/null 2>&1 || break; sleep 0.1; done
    for archive in /images/*.tar; do
        ctr --namespace k8s.io images import --no-unpack "$archive" || { tail /tmp/containerd.log; exit 1; }
    done
    kill $pid
    wait $pid || true
    rm -r /images /tmp/containerd.log'

is_root || die "needs root, for mmdebstrap"
docker info >/dev/null || die "needs docker; next: start it"
install_missing busybox jq mmdebstrap unshare >&2 || die "programs are missing that could not be installed"
# Where the functions of hack/e2e/cluster.sh write.
e2e=$(mktemp -d /var/tmp/csi-loopback-kind.XXXXXX)
trap 'rm -rf --one-file-system "$e2e"' EXIT
tree=$e2e/tree
link_tools
kind_tools=$(kind_tools) || die "kind cannot be built"
base=$(go_module kind sigs.k8s.io/kind)/images/base
suite=$(sed -n 's/^ARG BASE_IMAGE=debian:\(.*\)-slim$/\1/p' "$base/Dockerfile")
base=$base/files
version=$(cd "$repo/hack/tools/kubernetes" && go list -m -f '{{.Version}}' k8s.io/kubernetes)
say "making the Debian tree"
debian=$(debian_layer "$suite" bash ca-certificates conntrack containerd e2fsprogs ethtool iproute2 iptables jq kmod mount \
    nftables procps runc systemd util-linux) || die "the Debian tree cannot be made; next: see above, or set DEBIAN_MIRROR"
say "making the images of its pods"
add_on_images
kubernetes_images
say "making the node image"
base_image
node_image
mv "$e2e/images" "$tree/images"
in_tree "$finish" >&2
oci_layer "$tree" "$e2e/layer"
rm -rf --one-file-system "$tree"
oci_image "$e2e/node.tar" "$image" '{"Env": ["container=docker"], "StopSignal": "SIGRTMIN+3",
    "Entrypoint": ["/usr/local/bin/entrypoint", "/sbin/init"]}' "$e2e/layer"
say "loading it into docker"
docker load --input "$e2e/node.tar"
say "next: PATH=$kind_tools:$(dirname "$(readlink "$e2e/tools/kubectl")"):\$PATH KIND_IMAGE=$image" \
    "KIND_ARCHIVE=\$(hack/image.sh csi-loopback) hack/kind-demo.sh"
