# shellcheck shell=bash disable=SC2154
# The images of a release, and what installs them: chart and manifests.
# Sourced by hack/release.sh, never run.

# make_images: an archive for each image and architecture, and an index of each image. Sets digest to that of csi-loopback, and own_image.
make_images() {
    local architecture image archives
    mkdir -p "$out/images"
    for architecture in "${architectures[@]}"; do
        say "images for $architecture"
        IMAGE_ARCHITECTURE=$architecture CSI_LOOPBACK_BIN=$out/.build/$architecture/csi-loopback IMAGE_TAG=$version \
            IMAGE_DIR=$out/.build/$architecture/images hack/image.sh csi-snapshot-metadata csi-loopback >/dev/null ||
            die "no images for $architecture; next: see the messages above"
    done
    for image in csi-loopback csi-snapshot-metadata; do
        archives=()
        for architecture in "${architectures[@]}"; do
            archives+=("$out/.build/$architecture/images/$image.tar")
            cp "${archives[-1]}" "$out/images/$image-$version-$architecture.tar"
        done
        oci_index "$out/images/$image-$version.tar" "$image:$version" "${archives[@]}"
    done
    digest=$(<"$out/images/csi-loopback-$version.digest")
    own_image=${RELEASE_IMAGE:-csi-loopback}:$version@$digest
}

# pin DIRECTORY: hack/pin.sh; in a trial only the digest of the own image.
pin() {
    local sidecars
    read -ra sidecars <<<"${RELEASE_SIDECARS:-}"
    # A trial reads no registry.
    if [[ -z $trial || -n ${RELEASE_SIDECARS:-} ]]; then
        PIN_DIR=$1 hack/pin.sh "$own_image" "${sidecars[@]}" >/dev/null && return
    fi
    lacks "digests of the Kubernetes sidecars"
    mkdir -p "$1"
    printf 'apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nimages:\n  - {name: csi-loopback, newName: %s, newTag: "%s", digest: %s}\n' \
        "${RELEASE_IMAGE:-csi-loopback}" "$version" "$digest" >"$1/kustomization.yaml"
    printf 'image: {repository: %s, tag: "%s", digest: %s}\n' "${RELEASE_IMAGE:-csi-loopback}" "$version" "$digest" >"$1/values.yaml"
}

# rendered DIRECTORY [COMPONENT...]: a directory of deploy/ with pinned images. Kustomize requires relative paths.
rendered() {
    local work component
    work=$(mktemp -d "$out/.build/overlay.XXXXXX")
    {
        printf 'apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [%s]\ncomponents:\n' \
            "$(realpath --relative-to="$work" "deploy/$1")"
        for component in "${@:2}"; do printf '  - %s\n' "$(realpath --relative-to="$work" "deploy/components/$component")"; done
        printf '  - %s\n' "$(realpath --relative-to="$work" "$out/.build/pinned")"
    } >"$work/kustomization.yaml"
    "$kubectl" kustomize "$work" || die "deploy/$1 does not render"
    rm -r "$work"
}

# joined FILE...: YAML files as one.
joined() {
    local file
    for file; do printf -- '---\n' && cat "$file"; done
}

make_manifests() {
    local directory module to=$out/manifests
    mkdir -p "$to"
    for directory in base session-manager aggregated-api admission inline runtime node-proxy \
        examples/volume examples/backup-app examples/backup-app-session; do
        rendered "$directory" >"$to/${directory//\//-}.yaml"
    done
    rendered base cbt-http >"$to/base-with-cbt-http.yaml"
    # An argument names the image of the pods that it makes.
    rendered conformance | sed "s|--image=csi-loopback:.*|--image=$own_image|" >"$to/conformance.yaml"
    joined deploy/crds/*.yaml >"$to/crds.yaml"
    joined deploy/crds-upstream/*.yaml >"$to/crds-upstream.yaml"
    if module=$(go_module kubernetes github.com/kubernetes-csi/external-snapshotter/client/v8); then
        joined "$module"/config/crd/*.storage.k8s.io_*.yaml >"$to/snapshot-crds.yaml"
        snapshot_controller >"$to/snapshot-controller.yaml" || die "no manifest of snapshot-controller"
    else
        lacks "manifests of external-snapshotter: its Go module cannot be read"
    fi
}

# make_chart: deploy/chart with the pinned images as defaults. Its links become files.
make_chart() {
    local chart=$out/.build/chart key value
    rm -rf "$chart"
    cp -rL deploy/chart "$chart"
    install -m 644 LICENSE "$chart/LICENSE"
    for key in repository digest; do
        value=$(sed -nE "s/^image: .*\b$key: ([^,}]+).*/\1/p" "$out/.build/pinned/values.yaml")
        sed -i "/^image:/,/^$/s|^  $key: .*|  $key: $value|" "$chart/values.yaml"
    done
    value=$(sed -n '/^sidecarDigests:/,$s/^  //p' "$out/.build/pinned/values.yaml" | paste -sd , | sed 's/,/, /g')
    sed -i "s|^sidecarDigests: .*|sidecarDigests: {$value}|" "$chart/values.yaml"
    find "$chart" -type d -exec chmod 755 {} + && find "$chart" -type f -exec chmod 644 {} +
    tar_of "$chart" csi-loopback "$out/csi-loopback-chart-$version.tgz"
    if helm=$(go_tool helm); then
        "$helm" lint --strict "$out/csi-loopback-chart-$version.tgz" >&2 || die "the chart is not valid"
    else
        lacks "helm lint of the chart"
    fi
}

make_deployment() {
    say "chart and manifests"
    kubectl=$(kubernetes_tools)/kubectl || die "kubectl cannot be built; next: set CSI_LOOPBACK_KUBERNETES"
    pin "$out/.build/pinned"
    make_manifests
    make_chart
}

# make_bills: software bills of materials of the binary and the images.
make_bills() {
    local archives=("$out"/images/*-"$version-$(uname -m)".tar)
    say "bills of materials"
    if release_tool cargo-cyclonedx "$cargo_cyclonedx_version" >/dev/null && hack/sbom.sh >/dev/null && cp "$(dirname "$out")/csi-loopback.cdx.json" "$out/csi-loopback-$version.cdx.json"; then
        hack/sbom.sh "${archives[@]}" >/dev/null || die "no SBOM of the images"
    else
        lacks "bills of materials (cargo-cyclonedx)"
    fi
}
