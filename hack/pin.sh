#!/usr/bin/env bash
# hack/pin.sh IMAGE[@DIGEST] [SIDECAR@DIGEST...]: pins the images of deploy/ by digest, for a release. It writes, for commit:
#
#   deploy/components/pinned/kustomization.yaml   a component for overlays of every directory of deploy/
#   deploy/components/pinned/values.yaml          the same as values of the chart deploy/chart
#
#   IMAGE     csi-loopback in your registry, with a tag: registry.example/csi-loopback:0.1.0
#   SIDECAR   an image of sig-storage that deploy/ uses: csi-provisioner
#
# It reads other digests from the registries by skopeo: of the index if an image has several architectures. hack/image.sh
# writes the digest of each image that it builds.
#
# SIDECAR_REGISTRY   registry of the sidecars (registry.k8s.io/sig-storage)
# PIN_DIR            another directory for the two files
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

handle_help "$@"
image=${1:-}
image=${image%%@*}
[[ ${image##*/} == ?*:?* ]] || die "IMAGE with a tag is required; see --help"
registry=${SIDECAR_REGISTRY:-registry.k8s.io/sig-storage}
directory=${PIN_DIR:-deploy/components/pinned}

declare -A given=()
for argument in "${@:2}"; do
    [[ $argument == *@* ]] || die "$argument: not of the form SIDECAR@DIGEST"
    given[${argument%%@*}]=${argument#*@}
done

# digest_of IMAGE [DIGEST]: prints the digest, from the registry if it is not given.
digest_of() {
    local digest=${2:-}
    if [[ -z $digest ]]; then
        install_missing skopeo >&2 || die "needs skopeo; next: install it, or give the digest of $1"
        # The digest of an image is the checksum of its manifest.
        digest=sha256:$(skopeo inspect --raw "docker://$1" | sha256sum | cut -d ' ' -f 1) ||
            die "$1: registry returned no manifest; next: push the image, or give its digest"
    fi
    [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || die "$1: $digest is not a digest"
    printf '%s\n' "$digest"
}

repository=${image%:*} tag=${image##*:}
[[ $1 != *@* ]] || given[csi-loopback]=${1#*@}
digest=$(digest_of "$image" "${given[csi-loopback]:-}")
unset 'given[csi-loopback]'
images="  - {name: csi-loopback, newName: $repository, newTag: \"$tag\", digest: $digest}"
values="image: {repository: $repository, tag: \"$tag\", digest: $digest}
sidecarRegistry: $registry
sidecarDigests:"
mapfile -t sidecars < <(grep -rhoE 'registry\.k8s\.io/sig-storage/\S+:\S+' deploy --include='*.yaml' | sed 's|.*/||' | sort -u)
for sidecar in "${sidecars[@]}"; do
    name=${sidecar%:*} tag=${sidecar#*:}
    digest=$(digest_of "$registry/$sidecar" "${given[$name]:-}")
    unset "given[$name]"
    images+="
  - {name: registry.k8s.io/sig-storage/$name, newName: $registry/$name, newTag: $tag, digest: $digest}"
    values+="
  $name: $digest"
done
((${#given[@]} == 0)) || die "deploy/ has no image ${!given[*]}"

mkdir -p "$directory"
cat >"$directory/kustomization.yaml" <<END
# Pins images by digest, also in your registry. Written by hack/pin.sh. In an overlay:
#
#   components:
#     - ../../components/pinned
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
images:
$images
END
printf '# Pins images by digest. Written by hack/pin.sh.\n%s\n' "$values" >"$directory/values.yaml"
printf '%s\n' "$directory"
