#!/usr/bin/env bash
# hack/release.sh [--trial] VERSION: makes all files of a release below target/release-VERSION, and uploads nothing. The same
# commit gives the same files; a repeated run continues.
#
#   csi-loopback-VERSION-ARCHITECTURE.tar.gz    static binary, man pages, completions, units; .debug.xz: its debug information
#   csi-loopback_VERSION_*.deb, *.rpm           packages of the same files
#   images/                                     OCI archives of each architecture and an index, with digests
#   csi-loopback-chart-VERSION.tgz              Helm chart, with the image pinned by digest
#   manifests/                                  the same as manifests, definitions, and upstream's snapshot-controller
#   *.cdx.json, THIRD-PARTY.md                  bills of materials, and the licenses of the crates
#   RELEASE.md, SHA256SUMS                      the section of CHANGELOG.md and what was not made; checksums
#
#   --trial   for tests: takes a tree with changes and the section "Unreleased", and continues without the tools that are
#             missing. RELEASE.md lists what was not made
#
# RELEASE_BINARY    a csi-loopback to pack for this machine's architecture, instead of two builds of each (with --trial)
# RELEASE_IMAGE     repository of the image in chart and manifests: registry.example/csi-loopback (csi-loopback)
# RELEASE_SIDECARS  digests of the other images, as "csi-provisioner@sha256:... ..."; by default skopeo reads them from the
#                   registry, but for a trial
# RELEASE_MAINTAINER  of the Debian package: "NAME <ADDRESS>"
#
# Each binary is built twice, in two directories, and compared. Needs root (mmdebstrap), Rust with rustup, Go and gcc.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/oci.sh
source "$repo/hack/oci.sh"
# shellcheck source=hack/release/build.sh
source "$repo/hack/release/build.sh"
# shellcheck source=hack/release/packages.sh
source "$repo/hack/release/packages.sh"
# shellcheck source=hack/release/deploy.sh
source "$repo/hack/release/deploy.sh"
cd "$repo"

trial=
case ${1:-} in
-h | --help) usage && exit ;;
--trial) trial=1 && shift ;;
esac
version=${1:-}
[[ $# == 1 && $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "VERSION is required, such as 0.1.0; see --help"
[[ -z ${RELEASE_BINARY:-} || -n $trial ]] || die "RELEASE_BINARY needs --trial: a release is built twice and compared"
# Of compression; a trial is not kept.
level=9
[[ -z $trial ]] || level=1
out=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}/release-$version")

say() { printf '%5d s  %s\n' "$SECONDS" "$*" >&2; }

# Lines of RELEASE.md.
missing=()

# lacks WHAT: a release stops without it, and a trial continues.
lacks() {
    [[ -n $trial ]] || die "$1; next: see the messages above"
    missing+=("$1")
    say "not made: $1"
}

# changes: the section of CHANGELOG.md.
changes() {
    local section=$version
    [[ -z $trial ]] || grep -q "^## \[$version\]" CHANGELOG.md || section=Unreleased
    awk -v head="## [$section]" 'index($0, "## [") == 1 { inside = index($0, head) == 1; next } inside' CHANGELOG.md
}

check_versions() {
    local file pattern
    # Each names the version in its own way.
    while IFS=$'\t' read -r file pattern; do
        grep -qxE "$pattern" "$file" || die "$file does not name the version $version; next: set it in all files that have the former one"
    done <<END
Cargo.toml	version = "${version//./\\.}"
deploy/chart/Chart.yaml	version: ${version//./\\.}
deploy/chart/Chart.yaml	appVersion: ${version//./\\.}
deploy/Dockerfile	ARG VERSION=${version//./\\.}
deploy/base/driver.yaml	 *image: csi-loopback:${version//./\\.}
END
    [[ -n $(changes) ]] || die "CHANGELOG.md has no section [$version]; next: rename [Unreleased], with the date"
    [[ -n $trial || -z $(git status --porcelain) ]] || die "the tree has changes; next: commit them"
}

write_notes() {
    {
        printf '# csi-loopback %s\n\nCommit %s.\n' "$version" "$(git rev-parse HEAD)"
        if ((${#missing[@]})); then
            printf '\nNot made:\n\n'
            printf -- '- %s\n' "${missing[@]}"
        fi
        printf '\nVerify: sha256sum --check SHA256SUMS. Compare with a build of your own: hack/release.sh %s.\n' "$version"
        changes
    } >"$out/RELEASE.md"
}

check_versions
is_root || die "needs root, for mmdebstrap"
install_missing gcc jq xz objcopy git dpkg-deb rpmbuild >&2 || die "required commands are missing"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
mkdir -p "$out/.build"
# All but the builds, which cargo continues.
find "$out" -mindepth 1 -maxdepth 1 ! -name .build -exec rm -rf {} +
architectures=()
build_binaries
pack_architectures
make_images
make_deployment
make_bills
write_notes
say "checksums"
(cd "$out" && find . -path ./.build -prune -o -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs -d '\n' sha256sum >.build/sums &&
    mv .build/sums SHA256SUMS)
say "done: $out"
printf '%s\n' "$out"
