# shellcheck shell=bash disable=SC2154
# Writes OCI images without a registry and without a container engine.
# Sourced, never run, after hack/lib.sh.

# oci_layer DIRECTORY FILE: a layer with the contents of DIRECTORY, owned by root. The same contents give the same bytes.
oci_layer() {
    tar --create --file="$2" --directory="$1" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner .
}

# oci_blob LAYOUT FILE: moves FILE below LAYOUT and prints its digest.
oci_blob() {
    local digest
    digest=$(sha256sum "$2" | cut -d ' ' -f 1)
    mv "$2" "$1/blobs/sha256/$digest" && printf '%s\n' "$digest"
}

# oci_architecture: the name in images of IMAGE_ARCHITECTURE, by default this machine's.
oci_architecture() {
    local architecture=${IMAGE_ARCHITECTURE:-$(uname -m)}
    case $architecture in
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    *) printf '%s\n' "$architecture" ;;
    esac
}

# oci_image ARCHIVE NAME CONFIG LAYER...: writes ARCHIVE, an image of the layers. NAME is as in a pod's spec. CONFIG is
# the object "config" of the image configuration: Entrypoint, User, Labels. The archive is an OCI layout for containerd and
# for "kind load image-archive", with the index that "docker load" of every version reads. The file *.digest next to it
# has the image's digest.
oci_image() {
    local archive=$1 name=$2 config=$3 layout digest
    local diff_ids='[]' layers='[]' paths='[]' size
    shift 3
    layout=$(mktemp -d "$archive.XXXXXX")
    mkdir -p "$layout/blobs/sha256"
    for layer; do
        # A link: a layer belongs to several images.
        ln "$layer" "$layout/layer" 2>/dev/null || cp "$layer" "$layout/layer"
        digest=$(oci_blob "$layout" "$layout/layer")
        size=$(stat --format %s "$layout/blobs/sha256/$digest")
        diff_ids=$(jq -c --arg d "sha256:$digest" '. + [$d]' <<<"$diff_ids")
        layers=$(jq -c --arg d "sha256:$digest" --argjson s "$size" \
            '. + [{mediaType: "application/vnd.oci.image.layer.v1.tar", digest: $d, size: $s}]' <<<"$layers")
        paths=$(jq -c --arg p "blobs/sha256/$digest" '. + [$p]' <<<"$paths")
    done
    jq -n --arg architecture "$(oci_architecture)" --argjson config "$config" --argjson diff_ids "$diff_ids" \
        '{architecture: $architecture, os: "linux", config: $config, rootfs: {type: "layers", diff_ids: $diff_ids}}' \
        >"$layout/config"
    size=$(stat --format %s "$layout/config")
    digest=$(oci_blob "$layout" "$layout/config")
    jq -n --arg name "$name" --arg config "blobs/sha256/$digest" --argjson layers "$paths" \
        '[{Config: $config, RepoTags: [$name], Layers: $layers}]' >"$layout/manifest.json"
    jq -n --arg digest "sha256:$digest" --argjson size "$size" --argjson layers "$layers" '{schemaVersion: 2,
        mediaType: "application/vnd.oci.image.manifest.v1+json",
        config: {mediaType: "application/vnd.oci.image.config.v1+json", digest: $digest, size: $size},
        layers: $layers}' >"$layout/manifest"
    size=$(stat --format %s "$layout/manifest")
    digest=$(oci_blob "$layout" "$layout/manifest")
    jq -n --arg digest "sha256:$digest" --argjson size "$size" --arg architecture "$(oci_architecture)" '{
        mediaType: "application/vnd.oci.image.manifest.v1+json", digest: $digest, size: $size,
        platform: {architecture: $architecture, os: "linux"}}' >"$layout/descriptor"
    oci_archive "$archive" "$name" "$layout"
}

# oci_archive ARCHIVE NAME LAYOUT: writes ARCHIVE, and ARCHIVE.digest, of a layout whose file "descriptor" describes the
# image. Removes the layout.
oci_archive() {
    local archive=$1 name=$2 layout=$3 reference=$2 files=(oci-layout index.json blobs)
    # A name without a registry means Docker's, for containerd and kubelet too.
    [[ $name == */* ]] || reference=docker.io/library/$name
    jq --arg reference "$reference" --arg tag "${name##*:}" '{schemaVersion: 2, manifests: [. + {
        annotations: {"io.containerd.image.name": $reference, "org.opencontainers.image.ref.name": $tag}}]}' \
        "$layout/descriptor" >"$layout/index.json"
    printf '{"imageLayoutVersion": "1.0.0"}\n' >"$layout/oci-layout"
    [[ ! -e $layout/manifest.json ]] || files+=(manifest.json)
    tar --create --file="$archive" --directory="$layout" --sort=name --mtime=@0 --owner=0 --group=0 \
        --numeric-owner "${files[@]}"
    jq -r '.manifests[0].digest' "$layout/index.json" >"${archive%.tar}.digest"
    rm -r "$layout"
}

# oci_index ARCHIVE NAME ARCHIVE...: writes ARCHIVE, an index of images for several architectures.
oci_index() {
    local archive=$1 name=$2 layout one manifests='[]' size digest
    layout=$(mktemp -d "$archive.XXXXXX")
    for one in "${@:3}"; do
        tar --extract --file="$one" --directory="$layout" blobs
        manifests=$(tar -xOf "$one" index.json | jq -c --argjson all "$manifests" '$all + [.manifests[0] | del(.annotations)]')
    done
    jq -n --argjson manifests "$manifests" '{schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
        manifests: $manifests}' >"$layout/index"
    size=$(stat --format %s "$layout/index")
    digest=$(oci_blob "$layout" "$layout/index")
    jq -n --arg digest "sha256:$digest" --argjson size "$size" \
        '{mediaType: "application/vnd.oci.image.index.v1+json", digest: $digest, size: $size}' >"$layout/descriptor"
    oci_archive "$archive" "$name" "$layout"
}

# debian_layer RELEASE PACKAGE...: prints the path of a layer with a Debian tree, and makes it unless it is in the cache.
# DEBIAN_MIRROR overrides where the packages come from. Needs root and mmdebstrap.
debian_layer() {
    local release=$1 architecture list layer work sources debian=http://deb.debian.org/debian
    architecture=$(oci_architecture)
    # As in Debian's own images.
    sources=("deb $debian $release main" "deb $debian $release-updates main" "deb $debian-security $release-security main")
    [[ -z ${DEBIAN_MIRROR:-} ]] || sources=("$DEBIAN_MIRROR")
    list=$(printf '%s\n' "${@:2}" | paste -sd ,)
    layer=$cache/images/debian-$release-$(printf '%s\n' "$list" "${sources[@]}" | sha256sum | cut -c1-16)
    [[ -z ${IMAGE_ARCHITECTURE:-} || $IMAGE_ARCHITECTURE == "$(uname -m)" ]] || layer+=-$architecture
    layer+=.tar
    if [[ ! -e $layer ]]; then
        mkdir -p "$cache/images"
        echo "making the Debian tree (once per package list, about half a minute)" >&2
        work=$(mktemp "$cache/images/.build.XXXXXX")
        # Twice: a mirror that is being updated fails for a while.
        debian_tree "$release" "$architecture" "$list" "${sources[@]}" >"$work" ||
            { sleep 20 && debian_tree "$release" "$architecture" "$list" "${sources[@]}" >"$work"; } ||
            { rm -f "$work" && return 1; }
        mv "$work" "$layer"
    fi
    printf '%s\n' "$layer"
}

# debian_tree RELEASE ARCHITECTURE PACKAGES SOURCE...: writes a Debian tree as an archive to stdout.
debian_tree() {
    local packages=$3 variant=(--variant=essential)
    if [[ $2 != "$(IMAGE_ARCHITECTURE='' oci_architecture)" ]]; then
        # Its programs do not run here. Of the essential packages, what a shell in the container needs.
        variant=(--variant=extract --extract-hook="$repo/hack/unpacked-tree.sh")
        packages+=,base-files,base-passwd,bash,coreutils,dash,findutils,grep,hostname,libc-bin,sed
    fi
    # shellcheck disable=SC2016 # $1 is for the hook
    SOURCE_DATE_EPOCH=0 mmdebstrap --quiet "${variant[@]}" --architectures="$2" --include="$packages" \
        --aptopt='Acquire::Retries "5"' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --customize-hook='rm -rf "$1/var/lib/apt" "$1/var/cache" "$1/var/log"' \
        --skip=output/dev --format=tar "$1" - "${@:4}"
}
