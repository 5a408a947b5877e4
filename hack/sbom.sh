#!/usr/bin/env bash
# hack/sbom.sh [ARCHIVE...]: writes software bills of materials (CycloneDX 1.5, JSON) and prints their paths.
#
#   (no argument)   target/csi-loopback.cdx.json: the crates of the static binary
#   ARCHIVE         IMAGE.cdx.json next to an archive IMAGE.tar of hack/image.sh: these crates and its Debian packages
#
# The same commit and the same archive give the same file.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

handle_help "$@"
install_missing jq >&2 || die "needs jq"
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
mkdir -p "$target"
work=$(mktemp -d "$target/sbom.XXXXXX")
trap 'rm -rf "$work" csi-loopback_bin.cdx.json' EXIT

# crates: prints the SBOM of the binary. cargo-cyclonedx writes next to Cargo.toml, and names this crate by its directory.
crates() {
    local tool
    tool=$(cargo_cyclonedx) || return 1
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$tool" cyclonedx -qq --format json --spec-version 1.5 \
        --describe binaries --target "$(uname -m)-unknown-linux-musl" >&2 || return 1
    sed -E "s|path\+file://$repo#(csi-loopback@)?|csi-loopback@|g; s|path\+file://$repo/src/[a-z_]+#||g" csi-loopback_bin.cdx.json
}

blob() { tar -xOf "$1" "blobs/${2/://}"; } # blob ARCHIVE DIGEST

# packages ARCHIVE MANIFEST: prints the Debian packages of an image, from dpkg's database: name, version, architecture, release.
packages() {
    local layer
    for layer in $(blob "$1" "$2" | jq -r '.layers[].digest'); do
        blob "$1" "$layer" | tar -xO ./usr/lib/os-release ./var/lib/dpkg/status 2>/dev/null || true
    done | awk '
        sub(/^VERSION_CODENAME=/, "") { release = $0 }
        $1 == "Package:" { name = $2 }
        $1 == "Architecture:" { architecture = $2 }
        $1 == "Version:" { package[++count] = name " " $2 " " architecture }
        END { for (i = 1; i <= count; i++) print package[i], release }'
}

# image ARCHIVE: prints the SBOM of an image, whose components are the binary, its crates and the Debian packages.
image() {
    local digest
    digest=$(tar -xOf "$1" index.json | jq -r '.manifests[0].digest')
    packages "$1" "$digest" | jq --raw-input --slurp --slurpfile crates "$work/crates" --arg digest "$digest" \
        --arg name "$(basename "$1" .tar)" '
        [split("\n")[] | select(. != "") | split(" ") | {type: "library", name: .[0], version: .[1],
            purl: "pkg:deb/debian/\(.[0])@\(.[1] | @uri)?arch=\(.[2])&distro=\(.[3])"} | ."bom-ref" = .purl] as $packages
        | $crates[0] | .metadata.component as $binary
        | .metadata.component = {type: "container", name: $name, version: $digest,
            purl: "pkg:oci/\($name)@\($digest | @uri)", "bom-ref": $name}
        | .components = [$binary] + .components + $packages
        | .dependencies += [{ref: $name, dependsOn: [$binary, $packages[] | ."bom-ref"]}]'
}

crates >"$work/crates" || die "no SBOM of the crates; next: see the message above"
if (($# == 0)); then
    mv "$work/crates" "$target/csi-loopback.cdx.json"
    printf '%s\n' "$target/csi-loopback.cdx.json"
fi
for archive; do
    image "$archive" >"$work/image" || die "$archive: not an archive of hack/image.sh"
    mv "$work/image" "${archive%.tar}.cdx.json"
    printf '%s\n' "${archive%.tar}.cdx.json"
done
