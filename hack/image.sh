#!/usr/bin/env bash
# hack/image.sh [IMAGE...]: builds the images of this tree as OCI archives, without a registry, a base image or a
# container engine. The contents are those of deploy/Dockerfile.
#
#   csi-loopback            all roles: the static binary, and a Debian tree with the tools that the driver calls
#   csi-snapshot-metadata   the sidecar alone: the binary and nothing else
#
# Without arguments it builds both. It prints the path of each archive, target/images/IMAGE.tar, which
# "ctr --namespace k8s.io images import", "docker load --input" and "kind load image-archive" take. IMAGE.digest next to
# it has the digest, which "skopeo copy --preserve-digests" keeps.
#
# CSI_LOOPBACK_BIN   a csi-loopback to use instead of building the static release binary (csi-loopback only, if dynamic)
# IMAGE_TAG          the tag, by default the version of Cargo.toml
# IMAGE_ARCHITECTURE the architecture of CSI_LOOPBACK_BIN, by default this machine's. The Debian packages of another one are
#                    unpacked, not configured (hack/unpacked-tree.sh)
# IMAGE_DIR          the directory of the archives, by default target/images
# DEBIAN_SUITE       the Debian release of the tree, by default that of deploy/Dockerfile
# DEBIAN_MIRROR      where its packages come from, by default deb.debian.org with its updates and security
#
# Needs root (mmdebstrap), Rust with rustup, and gcc. The Debian tree is kept in ~/.cache/csi-loopback/images.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/oci.sh
source "$repo/hack/oci.sh"
cd "$repo"

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
images=$(realpath --canonicalize-missing "${IMAGE_DIR:-$target/images}")
dockerfile=deploy/Dockerfile

# packages: those that deploy/Dockerfile installs.
packages() {
    sed -n '/apt-get install/,/&&/p' "$dockerfile" | tr -d '\\&' | tr -s ' ' '\n' |
        grep -vxE -e '|RUN|apt-get|install|--.*|rm|-rf|/.*'
}

# suite: the Debian release of the base image of deploy/Dockerfile.
suite() {
    printf '%s\n' "${DEBIAN_SUITE:-$(sed -n 's/^ARG RUNTIME_IMAGE=debian:\(.*\)-slim$/\1/p' "$dockerfile")}"
}

# commit: of the tree that the binary is built from, with "-dirty" when files differ from it.
commit() { git describe --always --abbrev=40 --exclude '*' --dirty 2>/dev/null || echo unknown; }

# static_binary: builds the static release binary and prints its path.
static_binary() {
    local triple
    triple=$(uname -m)-unknown-linux-musl
    rustup target list --installed | grep -qx "$triple" || rustup target add "$triple" >&2 || return 1
    # What is C in it (ring) uses nothing of the C library, so the system's compiler serves.
    env "CC_${triple//-/_}=gcc" CSI_LOOPBACK_COMMIT="${CSI_LOOPBACK_COMMIT-$(commit)}" \
        cargo build --release --locked --bin csi-loopback --target "$triple" >&2 || return 1
    printf '%s\n' "$target/$triple/release/csi-loopback"
}

# config USER ENTRYPOINT TITLE: the image's configuration.
config() {
    jq -cn --arg user "$1" --arg entrypoint "$2" --arg title "$3" --arg version "$version" --arg revision "$(commit)" '
        {Entrypoint: [$entrypoint], Labels: {
        "org.opencontainers.image.title": $title, "org.opencontainers.image.version": $version,
        "org.opencontainers.image.revision": $revision, "org.opencontainers.image.licenses": "Apache-2.0"}}
        + {Env: ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
        + (if $user == "" then {} else {User: $user} end)'
}

build() { # build IMAGE
    local archive=$images/$1.tar name=$1:${IMAGE_TAG:-$version}
    case $1 in
    csi-loopback)
        local debian packages
        install_missing mmdebstrap >&2 || die "needs mmdebstrap; next: apt-get install mmdebstrap"
        mapfile -t packages < <(packages)
        debian=$(debian_layer "$(suite)" "${packages[@]}") || die "the Debian tree cannot be made; next: see above, or set DEBIAN_MIRROR"
        oci_image "$archive" "$name" "$(config "" /csi-loopback csi-loopback)" "$debian" "$work/binary.tar"
        ;;
    csi-snapshot-metadata)
        oci_image "$archive" "$name" "$(config 65532:65532 /csi-snapshot-metadata csi-snapshot-metadata)" \
            "$work/binary.tar"
        ;;
    *) die "$1: no such image; next: name csi-loopback or csi-snapshot-metadata" ;;
    esac
    printf '%s\n' "$archive"
}

handle_help "$@"
is_root || die "needs root, for mmdebstrap"
install_missing gcc jq >&2 || die "needs gcc and jq"
(($#)) || set -- csi-loopback csi-snapshot-metadata
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
mkdir -p "$images"
work=$(mktemp -d "$images/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
binary=${CSI_LOOPBACK_BIN:-$(static_binary)} || die "the binary does not build; next: see the messages of cargo above"
mkdir "$work/root"
install -m 755 "$binary" "$work/root/csi-loopback"
# The name selects the mode.
ln -s csi-loopback "$work/root/csi-snapshot-metadata"
chmod 755 "$work/root"
oci_layer "$work/root" "$work/binary.tar"
for image; do build "$image"; done
